#!/usr/bin/env python3
"""Turn text.txt into character tokens: data.bin (uint16, little-endian) and vocab.json (the character of each token).

    python make_data.py [TEXT]

Tokens number the distinct characters in code point order. Needs nothing beyond Python.
"""
import array, json, pathlib, sys


def main():
    here = pathlib.Path(__file__).parent
    text = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else here / "text.txt").read_text(encoding="utf-8")
    vocab = sorted(set(text))
    if len(vocab) > 65536:
        raise SystemExit(f"{len(vocab)} distinct characters do not fit 16 bits")
    number = {c: i for i, c in enumerate(vocab)}
    tokens = array.array("H", (number[c] for c in text))
    if sys.byteorder == "big":
        tokens.byteswap()
    (here / "data.bin").write_bytes(tokens.tobytes())
    (here / "vocab.json").write_text(json.dumps(vocab, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{len(tokens)} tokens, {len(vocab)} characters")


if __name__ == "__main__":
    main()
