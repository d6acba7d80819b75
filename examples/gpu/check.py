#!/usr/bin/env python3
"""The stages of check.sh. Each row of a stage is one JSON object with `ok`, and is written as soon as it is known, with the
table of all rows."""

import argparse
import concurrent.futures
import importlib.util
import json
import math
import os
import pathlib
import select
import signal
import sys
import tarfile
import threading
import time

import make_models
import rows as row_makers
import table
from process import Cut, Failed, Runner

KIT = pathlib.Path(__file__).resolve().parent
STAGES = ["machine", "smoke", "first", "correctness", "train", "time", "ranks", "sanitize"]
# Plans that must work before anything else is worth its time, and models whose correctness comes before timing.
SMOKE = ["mlp-fp32", "gpt2-bf16"]
CORE = ["gpt2", "llama", "attention_heads", "operations"]
COMPILE_MODES = ["default", "max-autotune-no-cudagraphs", "reduce-overhead"]
# What comes back of a call: at most these.
RESULTS, TABLE, LOG, CARRIED = "results.json", "gpu.md", "log.txt", "carried.tar.gz"
CARRIED_BYTES = 15 << 20

# Holds the GPU open, so that no other process pays for setting up the driver, until its input ends.
HOLDER = """
import ctypes, sys
cuda, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
for code in (cuda.cuInit(0), cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)):
    if code: sys.exit(f"error {code} of the driver")
print("open", flush=True)
sys.stdin.read()
"""


class Check:
    def __init__(self, a):
        lines = [json.loads(line) for line in (KIT / "kit.jsonl").read_text().splitlines()]
        self.kit, self.entries = lines[0], lines[1:]
        self.out, self.work = pathlib.Path(a.out), pathlib.Path(a.work)
        self.only, self.without, self.again, self.jobs = a.only, a.without, a.again, a.jobs
        for folder in (self.out, self.work):
            folder.mkdir(parents=True, exist_ok=True)
        self.cuda = self.kit["device"] == "cuda"
        spent = time.time() - float(os.environ.get("CHECK_BEGAN") or time.time())
        self.runner = Runner(a.deadline and a.deadline - spent, self.out / LOG)
        self.writing, self.holder, self.stopped = threading.RLock(), None, None
        # Of this machine, for every row: the driver, libraries and PyTorch, with versions and paths.
        self.software = {}
        self.known = {stage: {} for stage in STAGES}
        for folder in (a.earlier, a.out):
            path = pathlib.Path(folder or a.out) / RESULTS
            if path.exists():
                for stage, found in json.loads(path.read_text())["stages"].items():
                    self.known[stage] |= found
                break
        self.unpack(pathlib.Path(a.earlier or a.out) / CARRIED)
        self.environment()

    def environment(self):
        # Plans share most kernels of CUDA C++.
        os.environ.setdefault("FRIT_CUDA_CACHE", str(self.work.resolve() / "cubins"))
        # The libraries that PyTorch itself uses, wherever this Python has them.
        torch = importlib.util.find_spec("torch")
        if torch is not None and torch.origin:
            wheels = sorted((pathlib.Path(torch.origin).parents[1] / "nvidia").glob("*/lib"))
            self.wheels = ":".join(map(str, wheels))
            os.environ.setdefault("FRIT_CUDA_PATH", self.wheels)
        else:
            self.wheels = ""

    # What an earlier call measured and compiled.

    def unpack(self, archive):
        if archive.exists():
            with tarfile.open(archive) as tar:
                tar.extractall(self.work, filter="data")
            for path in (self.work / "tuning").glob("*.json"):
                plan = KIT / "plans" / path.stem
                if plan.is_dir() and not (plan / "tuning.json").exists():
                    (plan / "tuning.json").write_bytes(path.read_bytes())

    def pack(self):
        """Compiled kernels and the algorithms that were chosen, for the next call."""
        part = self.out / (CARRIED + ".part")
        with tarfile.open(part, "w:gz") as tar:
            if (self.work / "cubins").is_dir():
                tar.add(self.work / "cubins", "cubins")
            for path in sorted((KIT / "plans").glob("*/tuning.json")):
                tar.add(path, f"tuning/{path.parent.name}.json")
        if part.stat().st_size <= CARRIED_BYTES:
            part.replace(self.out / CARRIED)
        else:
            part.unlink()

    # Rows.

    def of(self, stage):
        return [e for e in self.entries if e["stage"] == stage]

    def is_done(self, stage, name):
        """Whether a row need not be made: it is good or cannot be had, or it failed with this very kit."""
        row = self.known[stage].get(name)
        if row is None or (self.again and self.again in f"{stage} {name}"):
            return False
        return row["ok"] is not False or (row["commit"] == self.kit["commit"] and not row.get("cut"))

    def make(self, stage, name, make):
        begin = time.monotonic()
        try:
            row = make()
        except Cut as e:
            if e.done is None:
                return  # It was not started, and is missing.
            row = {"ok": False, "cut": True, "note": str(e)}
        except Failed as e:
            row = {"ok": False, "note": str(e)}
        except Exception as e:  # What is wrong with one row must not cost the others.
            row = {"ok": False, "note": f"{type(e).__name__}: {e}"}
        row |= {"seconds": round(time.monotonic() - begin, 1), "commit": self.kit["commit"], "software": self.software}
        with self.writing:
            self.known[stage][name] = row
            self.write()
        mark = {True: "ok  ", False: "FAIL", None: "--  "}[row["ok"]]
        print(f"{mark} {stage} {name} {row.get('note', '')}".rstrip(), flush=True)

    def do(self, stage, groups, jobs=1):
        """Makes the rows that groups of names and functions say, several groups at once."""

        def is_wanted(name):
            # What every row says of its machine is not chosen.
            return stage == "machine" or (self.only in name and not any(text in f"{stage} {name}" for text in self.without))

        def work(group):
            for name, make in group:
                if is_wanted(name) and not self.is_done(stage, name) and self.runner.left() > 0:
                    self.make(stage, name, make)

        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            list(pool.map(work, groups))

    def write(self):
        """All rows, and the table of them; whole, or as before."""
        with self.writing:
            results = {"kit": self.kit, "stages": self.known}
            for name, text in ((RESULTS, json.dumps(results, indent=1)), (TABLE, table.render(self))):
                part = self.out / (name + ".part")
                part.write_text(text + "\n")
                part.replace(self.out / name)

    # What is to be done, in order.

    def parts(self):
        """Stages and groups of rows, those first that say the most; a stage may come several times."""
        r = row_makers.Rows(self)
        timed = [e for e in self.of("time") if "of" not in e]
        variants = {e["of"]: e for e in self.of("time") if "of" in e}
        correct = self.of("correctness")
        smoke = [e for e in correct if e["name"] in SMOKE]
        others = [e for e in correct if e["name"] not in SMOKE]
        core = [e for e in others if e["model"] in CORE]
        rest = [e for e in others if e["model"] not in CORE]

        def checked(entries):
            return [[(f"{e['name']} kernels", lambda e=e: r.kernels(e)), (f"{e['name']} steps", lambda e=e: r.steps(e))]
                    for e in entries]

        def with_variants(entries):
            return [e for base in entries for e in (base, variants.get(base["name"])) if e]

        def first(entries):
            return ("first", [[(e["name"], lambda e=e: r.first(e)) for e in with_variants(entries)]], 1)

        def times(entries):
            return ("time", [[item for e in with_variants(entries) for item in self.time_rows(r, e)]], 1)

        sanitized = [[(f"{e['name']} {tool}", lambda e=e, tool=tool: r.sanitized(e, tool))]
                     for e in self.of("sanitize") for tool in ("memcheck", "racecheck")]
        return [
            ("machine", [[("libraries", r.libraries), ("nvidia-smi", r.nvidia_smi), ("pytorch", r.pytorch),
                          ("ceilings", r.ceilings)]], 1),
            ("smoke", checked(smoke), self.jobs),
            first(timed[:1]),
            ("correctness", checked(core), self.jobs),
            ("train", [[(e["name"], lambda e=e: r.training(e)) for e in self.of("train")]], 1),
            times(timed[:1]),
            ("correctness", checked(rest), self.jobs),
            ("ranks", [self.rank_rows(r)], 1),
            first(timed[1:2]),
            times(timed[1:2]),
            first(timed[2:]),
            times(timed[2:]),
            ("sanitize", sanitized, self.jobs),
        ]

    def time_rows(self, r, e):
        if "of" in e:
            return [(f"{e['name']} frit", lambda: r.time_frit(e))]
        rows = [("frit", lambda: r.time_frit(e)), ("pytorch eager", lambda: r.time_peer(e, "eager"))]
        rows += [(f"pytorch compile {mode}", lambda mode=mode: r.time_peer(e, mode)) for mode in COMPILE_MODES]
        if e["model"].startswith("gpt2"):
            rows.insert(3, ("llm.c", lambda: r.time_llmc(e)))
        return [(f"{e['name']} {program}", make) for program, make in rows]

    def rank_rows(self, r):
        rows, ones = [], {e["model"]: e for e in self.of("ranks") if e["ranks"] == 1}
        for model, one in ones.items():
            rows.append((one["name"], lambda one=one: r.one_rank(one)))
            for e in (e for e in self.of("ranks") if e["model"] == model and e is not one):
                rows.append((e["name"], lambda e=e, one=one: r.ranks(e, one)))
                rows.append((f"{e['name']} blocking", lambda e=e, one=one: r.ranks(e, one, NCCL_COMM_BLOCKING=1)))
                rows.append((f"{e['name']} a killed rank", lambda e=e: r.killed(e)))
        return rows

    def hold(self):
        """Opens the GPU for as long as this runs: a row."""
        if not self.cuda:
            return {"ok": None, "note": "not run: no plans for a GPU"}
        limit, _ = self.runner.limit(90)
        begin = time.monotonic()
        self.holder = self.runner.start([sys.executable, "-c", HOLDER], stdin=-1, stdout=-1, stderr=-1)
        ready, _, _ = select.select([self.holder.stdout], [], [], limit)
        if not ready:
            raise Failed(f"the driver did not open the GPU within {limit:.0f} s")
        if not self.holder.stdout.readline():
            raise Failed(self.holder.stderr.read().decode().strip().splitlines()[-1])
        return {"ok": True, "note": f"open after {time.monotonic() - begin:.1f} s"}

    def run(self, stage):
        """Makes rows until all are there, the deadline, or nothing works."""
        # Each call may be on another machine.
        self.known["machine"] = {}
        self.make("machine", "context", self.hold)
        for name, groups, jobs in self.parts():
            if name != "machine" and stage not in (name, "all"):
                continue
            self.do(name, groups, jobs)
            if self.cuda and name != "machine":
                self.pack()
            smoke = self.known["smoke"]
            working = [plan for plan in SMOKE if all(row["ok"] for key, row in smoke.items() if key.startswith(plan))]
            if name == "smoke" and len(smoke) == 2 * len(SMOKE) and not working:
                self.stopped = "both smoke tests failed; nothing else was run"
                return

    def finish(self):
        """Ends what runs, writes the table and prints it."""
        self.runner.kill_all()
        self.write()
        print(table.render(self), flush=True)

    def expected(self, stage):
        """Names of all rows of a stage."""
        names = {name for part, groups, _ in self.parts() if part == stage for group in groups for name, _ in group}
        return names | ({"context"} if stage == "machine" else set())


def guard(check):
    """Writes the table and ends this program should the deadline find it anywhere, or a signal end it."""
    ended = threading.Event()

    def leave(*_):
        if not ended.is_set():
            ended.set()
            check.stopped = check.stopped or "ended before all was done"
            check.finish()
            os._exit(1)

    def watch():
        left = check.runner.end - time.monotonic() - check.runner.reserve / 2
        if math.isfinite(left) and not ended.wait(max(0.0, left)):
            leave()

    threading.Thread(target=watch, daemon=True).start()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, leave)
    return ended


def main():
    p = argparse.ArgumentParser(description="Stages of check.sh")
    p.add_argument("stage", nargs="?", default="all", choices=[*STAGES, "table", "all"])
    p.add_argument("--deadline", type=float, metavar="SECONDS", help="end with the table written after so many seconds")
    p.add_argument("--out", default=os.environ.get("OUT") or "check-out")
    p.add_argument("--from", dest="earlier", metavar="DIR", help="a folder with results of an earlier call")
    p.add_argument("--only", default="", metavar="TEXT", help="rows whose name holds TEXT")
    p.add_argument("--without", default=[], action="append", metavar="TEXT",
                   help="no rows whose stage and name hold TEXT; may be given several times")
    p.add_argument("--again", metavar="TEXT", help="also rows that are done, where stage and name hold TEXT")
    p.add_argument("--jobs", type=int, default=max(1, min(4, (os.cpu_count() or 1) // 4)),
                   help="rows of smoke, correctness and sanitize at once")
    p.add_argument("--work", default="/tmp/frit-check", metavar="DIR", help="for files that are not results")
    a = p.parse_args()
    check = Check(a)
    ended = guard(check)
    if a.stage != "table":
        check.run(a.stage)
    ended.set()
    check.finish()
    rows = [row for stage in check.known.values() for row in stage.values()]
    return 1 if any(row["ok"] is False for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
