#!/usr/bin/env python3
"""Write the package descriptions of Debian or Ubuntu as pairs of a text and its summary.

    python3 pairs.py OUT/pairs.jsonl

A line is `{"text": the description, "summary": the synopsis}`. The texts are those of this machine's release, read from
apt's lists; where these lack descriptions, as in containers, apt fetches its lists into the folder of the output and leaves
those of the system alone. Packages that are built from one source begin their descriptions alike: of each beginning only one
package is kept, so that no text of the validation has a sibling in the training data.
"""
import json
import pathlib
import re
import subprocess
import sys

RECORD = re.compile(r"^Package: .*\n(?:.*\n)*?Description-en: (?P<summary>.*)\n(?P<text>(?: .*\n?)+)", re.M)


def run(*command):
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def descriptions(options):
    """The content of apt's files of English descriptions."""
    files = run("apt-get", *options, "indextargets", "--format", "$(FILENAME)", "Created-By: Translations").split("\n")
    files = [f for f in files if re.search(r"Translation-en\b", f)]
    return "".join(run("/usr/lib/apt/apt-helper", *options, "cat-file", f) + "\n" for f in files)


def fetched(folder):
    """The same, fetched into a folder."""
    for part in ("lists/partial", "cache"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    options = [f"-oDir::State::Lists={folder}/lists", f"-oDir::Cache={folder}/cache", "-oAcquire::Languages=en"]
    subprocess.run(["apt-get", *options, "-q", "update"], check=True, stdout=sys.stderr)
    return descriptions(options)


def plain(text):
    """A description as one line: its paragraphs are separated by lines with one dot."""
    return " ".join(line.strip() for line in text.split("\n") if line.strip() not in ("", "."))


def main(path):
    try:
        records = descriptions([]) or fetched(path.parent / "apt")
    except FileNotFoundError:
        sys.exit("pairs.py: this is no Debian or Ubuntu: there is no apt-get. Give run.sh pairs of another source (PAIRS=FILE)")
    pairs = {}
    for record in RECORD.finditer(records):
        beginning = plain(record["text"].split("\n .\n")[0])
        pairs.setdefault(beginning, {"text": plain(record["text"]), "summary": record["summary"].strip()})
    with path.open("w") as out:
        out.writelines(json.dumps(pair, ensure_ascii=False) + "\n" for _, pair in sorted(pairs.items()))
    print(f"{len(pairs)} pairs in {path}")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
