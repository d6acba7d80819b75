#!/usr/bin/env python3
"""The stages of check.sh. Each row of a stage is one JSON object with `ok`, and is written as soon as it is known."""

import argparse
import concurrent.futures
import importlib.util
import json
import math
import os
import pathlib
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time

import make_models

KIT = pathlib.Path(__file__).resolve().parent
STAGES = ["correctness", "train", "time", "ranks", "sanitize"]
# Largest deviation of losses, over their size, and of gradients, norm of the difference over norm.
LOSS_TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2, "fp8": 2e-2}
GRAD_TOLERANCE = {"fp32": 1e-3, "bf16": 5e-2, "fp8": 1e-1}
# Another number of ranks sums in another order.
RANK_TOLERANCE = 1e-4
# Dense bf16 FLOP/s by what nvidia-smi calls the GPU, from NVIDIA's data sheets.
PEAKS = {"H100 PCIe": 756e12, "H100": 989.4e12, "H200": 989.4e12, "A100": 312e12}
STEPS = {"train": 20, "time": 20, "ranks": 10}
# Seconds for a first start, which compiles kernels and measures algorithms of GEMMs and convolutions.
FIRST_START = 540


class Check:
    def __init__(self, a):
        lines = [json.loads(line) for line in (KIT / "kit.jsonl").read_text().splitlines()]
        self.kit, self.entries = lines[0], lines[1:]
        self.out, self.only = pathlib.Path(a.out), a.only
        self.out.mkdir(parents=True, exist_ok=True)
        self.work = pathlib.Path(a.work)
        self.work.mkdir(parents=True, exist_ok=True)
        self.earlier = pathlib.Path(a.earlier) if a.earlier else self.out
        self.cuda = self.kit["device"] == "cuda"
        self.jobs, self.writing = a.jobs, threading.Lock()
        # Plans share most kernels of CUDA C++.
        os.environ.setdefault("FRIT_CUDA_CACHE", str(self.work.resolve() / "cubins"))
        # The libraries that PyTorch itself uses, wherever this Python has them.
        torch = importlib.util.find_spec("torch")
        if torch is not None:
            wheels = sorted((pathlib.Path(torch.origin).parents[1] / "nvidia").glob("*/lib"))
            os.environ.setdefault("FRIT_CUDA_PATH", ":".join(map(str, wheels)))

    def scratch(self, name):
        """A file of this thread's row."""
        folder = self.work / f"rows-{threading.get_native_id()}"
        folder.mkdir(exist_ok=True)
        return folder / name

    def of(self, stage):
        return [e for e in self.entries if e["stage"] == stage]

    def read(self, stage):
        """Rows that are known of this kit's commit."""
        for folder in (self.out, self.earlier):
            path = folder / f"{stage}.json"
            if path.exists():
                known = json.loads(path.read_text())
                if known["kit"] == self.kit:
                    return known["rows"]
        return {}

    def rows(self, stage, groups, jobs=1):
        """Does what groups of names and functions say, several groups at once, but for rows that are known and did not
        fail."""
        rows = self.read(stage)

        def work(group):
            for name, make in group:
                if self.only not in name or rows.get(name, {}).get("ok"):
                    continue
                begin = time.perf_counter()
                try:
                    row = make()
                except Failed as e:
                    row = {"ok": False, "note": str(e)}
                except Exception as e:  # What is wrong with one row must not cost the others.
                    row = {"ok": False, "note": f"{type(e).__name__}: {e}"}
                with self.writing:
                    rows[name] = row | {"seconds": round(time.perf_counter() - begin, 1)}
                    path = self.out / f"{stage}.json"
                    part = path.with_suffix(".part")
                    part.write_text(json.dumps({"kit": self.kit, "rows": rows}, indent=1) + "\n")
                    part.replace(path)
                mark = {True: "ok  ", False: "FAIL", None: "--  "}[row["ok"]]
                print(f"{mark} {stage} {name} {row.get('note', '')}".rstrip(), flush=True)

        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            list(pool.map(work, groups))
        return rows

    def run(self, arguments, timeout=300, **environment):
        """Runs a command; its output, or why there is none."""
        environment = {**os.environ, **{k: str(v) for k, v in environment.items()}}
        try:
            done = subprocess.run([str(x) for x in arguments], env=environment, timeout=timeout, capture_output=True, text=True)
        except subprocess.TimeoutExpired:
            raise Failed(f"no end after {timeout} s") from None
        if done.returncode:
            raise Failed(f"exit code {done.returncode}: {last_line(done)}", done)
        return done.stdout

    def train(self, plan, data, steps, *more, **environment):
        """Runs steps of a plan; the lines of its metrics."""
        metrics = self.scratch("metrics.jsonl")
        metrics.unlink(missing_ok=True)
        self.run([FRIT_RUN, KIT / "plans" / plan, "--data", data, "--steps", steps, "--metrics", metrics, *more], **environment)
        return read_lines(metrics)

    def data(self, entry):
        """The data file of an entry; images are made from a fixed seed."""
        if entry["data"] != "images":
            return KIT / entry["data"]
        sizes, n = {**make_models.MODELS, **make_models.TINY}[entry["model"]], 2 * entry["batch"]
        path = self.work / f"images-{sizes['image']}-{n}.safetensors"
        if not path.exists():
            import torch
            from safetensors.torch import save_file

            g = torch.Generator().manual_seed(0)
            images = torch.randn(n, 3, sizes["image"], sizes["image"], generator=g)
            labels = torch.randint(0, sizes["classes"], (n,), generator=g)
            save_file({"image": images, "labels": labels}, path)
        return path

    def peer(self, entry, batch, steps, *more):
        """Runs the model with PyTorch; what it wrote."""
        path = self.scratch("peer.json")
        path.unlink(missing_ok=True)
        self.run([sys.executable, KIT / "peer.py", "--model", entry["model"], "--data", self.data(entry), "--batch", batch,
                  "--steps", steps, "--precision", entry["precision"], "--device", self.kit["device"], "--json", path, *more],
                 timeout=480)
        return json.loads(path.read_text())

    # What the stages do; each returns a row.

    def kernels(self, entry):
        """Every kernel of the plan beside the interpreter, on the device's own operands."""
        command = [FRIT_RUN, "compare", KIT / "plans" / entry["name"], "--data", KIT / entry["data"], "--json"]
        try:
            found = json.loads(self.run(command, timeout=FIRST_START))
        except Failed as e:
            # With exit code 1 the comparison ended, and some kernels are far.
            if e.done is None or e.done.returncode != 1:
                raise
            found = json.loads(e.done.stdout)
        far = [k for k in found["kernels"] if not k["error"] <= k["tolerance"]]
        worst = max(found["kernels"], key=lambda k: k["error"] / (k["tolerance"] or 1))
        note = "; ".join(f"{k['kernel']} ({k['ops']}) error {k['error']:.1e}" for k in far)
        return {"ok": not far and not found["left_out"], "compared": len(found["kernels"]), "far": far,
                "left_out": found["left_out"], "worst": worst, "note": note}

    def steps(self, entry):
        """Losses of five steps, the gradients of the first, and the loss of validation after the last beside the CPU's."""
        grads, data = self.scratch("grads.safetensors"), KIT / entry["data"]
        reference = KIT / "references" / entry["name"]
        expected = read_lines(reference / "metrics.jsonl")
        validation = ["--validation", data] if len(expected) > 5 else []
        found = self.train(entry["name"], data, 5, "--dump-grads", grads, *validation)
        loss = largest_deviation(losses(found), losses(expected))
        grad = grad_deviation(grads, reference / "grads.safetensors")
        precision = entry["precision"]
        ok = loss <= LOSS_TOLERANCE[precision] and grad <= GRAD_TOLERANCE[precision]
        return {"ok": ok, "loss_deviation": loss, "grad_deviation": grad,
                "note": "" if ok else f"losses differ by {loss:.1e}, gradients by {grad:.1e}"}

    def training(self, entry):
        """The losses of training beside PyTorch's, from the same weights over the same data."""
        weights, steps = self.scratch("weights.safetensors"), STEPS["train"]
        data = self.data(entry)
        self.train(entry["name"], data, 0, "--save", weights)
        found = losses(self.train(entry["name"], data, steps))
        same = self.peer(entry, entry["batch"], steps, "--weights", weights)["losses"]
        exact = self.peer(entry | {"precision": "fp32"}, entry["batch"], steps, "--weights", weights)["losses"]
        deviation, peers = mean_deviation(found, exact), mean_deviation(same, exact)
        allowed = LOSS_TOLERANCE["fp32"] if entry["precision"] == "fp32" else 1.5 * peers + 1e-4
        ok = deviation <= allowed and found[-1] < found[0]
        return {"ok": ok, "losses": found, "pytorch_losses": same, "pytorch_fp32_losses": exact,
                "deviation_from_fp32": deviation, "pytorch_deviation_from_fp32": peers,
                "note": f"deviation from PyTorch fp32 {deviation:.1e}, PyTorch's own {peers:.1e}"}

    def time_frit(self, entry):
        usage, trace = self.scratch("usage.json"), self.scratch("trace.json")
        data, plan = self.data(entry), entry["name"]
        # The first start measures the algorithms of GEMMs; their times are kept beside the plan.
        begin = time.perf_counter()
        self.train(plan, data, 1, timeout=FIRST_START)
        first_start = time.perf_counter() - begin
        found = self.train(plan, data, STEPS["time"], "--usage", usage)
        step_s = statistics.median(step_seconds(entry, found)[len(found) // 2:])
        used = json.loads(usage.read_text())
        self.train(plan, data, 3, "--trace", trace)
        busy, tasks = read_trace(trace)
        arenas = sum(used[f"{x}_bytes"] for x in ("persistent", "workspace", "extra"))
        row = {"step_s": step_s, "peak_allocated_bytes": arenas, "device_bytes": used.get("device_bytes"),
               "kernels": sum(used["launches"].values()), "launches": used["launches"],
               "graph_launches": used.get("graph_launches"), "gap": max(0.0, 1 - busy / step_s), "tasks": tasks,
               "first_start_s": first_start, "losses": losses(found)}
        return self.rates(entry, entry["batch"], row)

    def time_peer(self, entry, mode):
        batch = entry["batch"]
        while True:
            try:
                more = ["--mode", mode, "--pad-vocab", "--profile"]
                found = self.peer(entry, batch, STEPS["time"], *more)
                return self.rates(entry, batch, found)
            except Failed as e:
                if "out of memory" not in str(e) or batch == 1:
                    raise
                batch //= 2

    def rates(self, entry, batch, row):
        examples, flops = per_example(entry["model"])
        row["batch"] = batch
        row["rate"] = batch * examples / row["step_s"]
        peak = next((p for name, p in PEAKS.items() if name in gpu_name()), None) if self.cuda else None
        row["mfu"] = batch * flops / row["step_s"] / peak if peak else None
        mfu = f", MFU {row['mfu']:.1%}" if peak else ""
        return {"ok": True, "note": f"{row['rate']:.0f} {unit(entry)}/s, batch {batch}{mfu}"} | row

    def ranks(self, entry, expected):
        found = losses(self.processes(entry, STEPS["ranks"]))
        deviation = largest_deviation(found, expected)
        return {"ok": deviation <= RANK_TOLERANCE, "losses": found, "deviation": deviation,
                "note": f"losses differ from one rank's by {deviation:.1e}"}

    def processes(self, entry, steps):
        """Every rank as a process on the same GPU; rank 0's metrics."""
        started = self.start(entry, steps)
        ends = []
        for process in started:
            try:
                ends.append(process.communicate(timeout=240)[1])
            except subprocess.TimeoutExpired:
                for p in started:
                    p.kill()
                raise Failed("the ranks did not end after 240 s") from None
        for rank, (process, said) in enumerate(zip(started, ends)):
            if process.returncode:
                raise Failed(f"rank {rank} ended with {process.returncode}: {said.strip().splitlines()[-1:]}")
        return read_lines(self.scratch("metrics.jsonl"))

    def start(self, entry, steps):
        metrics = self.scratch("metrics.jsonl")
        metrics.unlink(missing_ok=True)
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        command = [FRIT_RUN, KIT / "plans" / entry["name"], "--data", self.data(entry), "--steps", steps,
                   "--metrics", metrics]
        n = entry["ranks"]
        place = {"WORLD_SIZE": n, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "FRIT_TIMEOUT": 120}
        started = []
        for rank in range(n):
            # NCCL takes ranks that name different hosts for different machines, and lets them share a GPU.
            own = place | {"RANK": rank, "LOCAL_RANK": rank, "NCCL_HOSTID": f"check-{rank}"}
            environment = {**os.environ, **{k: str(v) for k, v in (own if n > 1 else {}).items()}}
            started.append(subprocess.Popen([str(x) for x in command], env=environment, stdout=subprocess.DEVNULL,
                                            stderr=subprocess.PIPE, text=True))
        return started

    def killed(self, entry):
        """A rank that is killed ends the others with exit code 2 and a sentence."""
        first, *others = self.start(entry, 1_000_000)
        metrics, deadline = self.scratch("metrics.jsonl"), time.monotonic() + 180
        try:
            while not (metrics.exists() and len(metrics.read_text().splitlines()) > 2):
                if time.monotonic() > deadline or first.poll() is not None:
                    raise Failed("the ranks did not start")
                time.sleep(0.05)
            others[-1].send_signal(signal.SIGKILL)
            begin = time.monotonic()
            try:
                said = first.communicate(timeout=150)[1].strip()
            except subprocess.TimeoutExpired:
                raise Failed("rank 0 hangs after another rank was killed") from None
            after = time.monotonic() - begin
            ok = first.returncode == 2 and "rank" in said
            return {"ok": ok, "note": f"rank 0 ended with {first.returncode} after {after:.1f} s: {said.splitlines()[-1:]}"}
        finally:
            for process in (first, *others):
                process.kill()

    def sanitized(self, entry, tool):
        program = shutil.which("compute-sanitizer") or next(
            (str(p) for p in pathlib.Path("/usr/local").glob("cuda*/bin/compute-sanitizer")), None)
        if not self.cuda or program is None:
            return {"ok": None, "note": "not run: no GPU plan" if not self.cuda else "not run: there is no compute-sanitizer"}
        command = [program, "--tool", tool, "--error-exitcode", 9, FRIT_RUN, KIT / "plans" / entry["name"], "--data",
                   KIT / entry["data"], "--steps", 3]
        output = self.run(command, timeout=400)
        summary = [line for line in output.splitlines() if "SUMMARY" in line]
        return {"ok": True, "note": " ".join(summary)}

    # The stages.

    def correctness(self):
        # Most of the time is the host's: compiling, measuring, interpreting.
        groups = [[(f"{e['name']} kernels", lambda e=e: self.kernels(e)), (f"{e['name']} steps", lambda e=e: self.steps(e))]
                  for e in self.of("correctness")]
        return self.rows("correctness", groups, self.jobs)

    def train_stage(self):
        return self.rows("train", [[(e["name"], lambda e=e: self.training(e)) for e in self.of("train")]])

    def time_stage(self):
        work = []
        for e in self.of("time"):
            work.append((f"{e['name']} frit", lambda e=e: self.time_frit(e)))
            for mode in ("eager", "compile"):
                work.append((f"{e['name']} pytorch {mode}", lambda e=e, mode=mode: self.time_peer(e, mode)))
        return self.rows("time", [work])

    def ranks_stage(self):
        entries = self.of("ranks")
        one = next(e for e in entries if e["ranks"] == 1)
        alone = (one["name"], lambda: self.ranks(one, losses(self.processes(one, STEPS["ranks"]))))
        rows = self.rows("ranks", [[alone]])
        expected = rows.get(one["name"], {}).get("losses")
        if expected is None:
            return rows
        work = [(e["name"], lambda e=e: self.ranks(e, expected)) for e in entries if e is not one]
        two = next(e for e in entries if e["ranks"] == 2)
        return self.rows("ranks", [[*work, ("a killed rank", lambda: self.killed(two))]])

    def sanitize(self):
        tools = ("memcheck", "racecheck")
        return self.rows("sanitize", [[(f"{e['name']} {tool}", lambda e=e, tool=tool: self.sanitized(e, tool))]
                                      for e in self.of("sanitize") for tool in tools], self.jobs)

    def table(self):
        """Prints what is known of all stages as Markdown, and writes gpu.md and gpu.json."""
        known = {stage: self.read(stage) for stage in STAGES}
        machine = describe_machine(self.cuda)
        text = render(self, known, machine)
        (self.out / "gpu.json").write_text(json.dumps({"kit": self.kit, "machine": machine, **known}, indent=1) + "\n")
        (self.out / "gpu.md").write_text(text)
        print(text)


class Failed(Exception):
    """A row that has no result; `done` is the process, if it ended."""

    def __init__(self, why, done=None):
        super().__init__(why)
        self.done = done


FRIT_RUN = KIT / "bin" / "frit-run"


def last_line(done):
    lines = [line for line in (done.stderr + "\n" + done.stdout).splitlines() if line.strip()]
    errors = [line for line in lines if "rror" in line]
    return (errors or lines or ["it said nothing"])[-1].strip()[:400]


def read_lines(path):
    return [json.loads(line) for line in pathlib.Path(path).read_text().splitlines()] if pathlib.Path(path).exists() else []


def losses(lines):
    """Those of the steps, and where there are any those of validation."""
    return [line["loss"] if "loss" in line else line["validation_loss"] for line in lines]


def largest_deviation(found, expected):
    """Over the size of what is expected; infinite if anything is missing or no number."""
    if len(found) != len(expected) or not found:
        return math.inf
    deviations = [abs(a - b) / max(abs(b), 1e-6) for a, b in zip(found, expected)]
    return math.inf if any(math.isnan(d) for d in deviations) else max(deviations)


def mean_deviation(found, expected):
    if len(found) != len(expected) or not found:
        return math.inf
    return statistics.fmean(abs(a - b) / abs(b) for a, b in zip(found, expected))


def grad_deviation(found, expected):
    """Norm of the difference of all gradients over the norm of what is expected."""
    import torch
    from safetensors.torch import load_file

    found, expected = load_file(found), load_file(expected)
    if found.keys() != expected.keys():
        return math.inf
    difference = sum(torch.sum((found[k].double() - expected[k].double()) ** 2).item() for k in expected)
    norm = sum(torch.sum(expected[k].double() ** 2).item() for k in expected)
    deviation = math.sqrt(difference / norm) if norm else math.inf
    return math.inf if math.isnan(deviation) else deviation


def step_seconds(entry, lines):
    """Every loss element is a token or an example here."""
    examples, _ = per_example(entry["model"])
    return [entry["batch"] * examples / line["tokens_or_examples_per_s"] for line in lines]


def read_trace(path):
    """Seconds in which the compute stream was busy, and the tasks that took most of it: name, seconds, predicted."""
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X" and e["tid"] == 0]
    by_name = {}
    for e in events:
        name = e["name"].rsplit("_", 1)[0]
        row = by_name.setdefault(name, {"task": name, "n": 0, "s": 0.0, "predicted_s": 0.0})
        row["n"] += 1
        row["s"] += e["dur"] / 1e6
        row["predicted_s"] += e["args"]["predicted_us"] / 1e6
    longest = sorted(by_name.values(), key=lambda row: -row["s"])[:20]
    return sum(e["dur"] for e in events) / 1e6, longest


def per_example(name):
    """Tokens (or images) of an example, and the FLOP of a training step for it.

    A token costs six FLOP per parameter, position embeddings left out, and 12 · layers · width · seq for attention, as
    in the PaLM paper; an image three times the two FLOP of each multiplication of the forward pass.
    """
    sizes = {**make_models.MODELS, **make_models.TINY}[name]
    if sizes["kind"] != "resnet":
        layers, width, seq = sizes["layers"], sizes["width"], sizes["seq"]
        parameters = layers * (12 * width ** 2 + 13 * width) + sizes["vocab"] * width
        return seq, seq * (6 * parameters + 12 * layers * width * seq)
    half, width = sizes["image"] // 2, sizes["width"]
    macs, side, channels = half ** 2 * 3 * 49 * width, half // 2, width
    for stage, n in enumerate(sizes["blocks"]):
        inner = width * 2 ** stage
        for i in range(n):
            after = side // 2 if stage and i == 0 else side
            macs += side ** 2 * channels * inner + after ** 2 * (9 * inner ** 2 + 4 * inner ** 2)
            macs += after ** 2 * channels * 4 * inner if i == 0 else 0
            side, channels = after, 4 * inner
    return 1, 6 * (macs + channels * sizes["classes"])


def unit(entry):
    return "images" if entry["model"].startswith("resnet") else "tokens"


def gpu_name():
    try:
        query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip().splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "no GPU"


def describe_machine(cuda):
    import torch

    found = {"gpu": gpu_name() if cuda else "none, plans for the CPU", "python": sys.version.split()[0], "torch": torch.__version__}
    if cuda:
        found["cuda"] = torch.version.cuda
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None
        found["cudnn"] = torch.backends.cudnn.version()
    return found


def render(check, known, machine):
    lines = [f"Frit {check.kit['commit']}, plans for {check.kit['device']} {check.kit['arch']}; "
             + ", ".join(f"{k} {v}" for k, v in machine.items()) + ".", ""]
    for stage in STAGES:
        rows, expected = known[stage], n_rows(check, stage)
        good = sum(1 for row in rows.values() if row["ok"])
        bad = [name for name, row in rows.items() if row["ok"] is False]
        skipped = sum(1 for row in rows.values() if row["ok"] is None)
        lines.append(f"- {stage}: {good} of {expected} rows are good"
                     + (f", {skipped} not run" if skipped else "") + (f", {expected - len(rows)} missing" if expected > len(rows) else ""))
        lines.extend(f"  - **{name}**: {rows[name].get('note', '')}" for name in bad)
    lines += ["", "| model | program | batch | per second | MFU | beside eager | peak memory, GiB | kernels | gaps |",
              "|---|---|---|---|---|---|---|---|---|"]
    for e in check.of("time"):
        eager = known["time"].get(f"{e['name']} pytorch eager", {}).get("rate")
        for program in ("pytorch eager", "pytorch compile", "frit"):
            row = known["time"].get(f"{e['name']} {program}")
            if row is None or not row["ok"]:
                continue
            mfu = f"{row['mfu']:.1%}" if row["mfu"] else ""
            beside = f"{row['rate'] / eager:.2f}" if eager else ""
            memory = f"{row['peak_allocated_bytes'] / 2 ** 30:.1f}" if row.get("peak_allocated_bytes") else ""
            lines.append(f"| {e['model']} | {program} | {row['batch']} | {row['rate']:.0f} {unit(e)} | {mfu} | {beside} | {memory} "
                         f"| {row.get('kernels', '')} | {row.get('gap', 0):.1%} |")
    return "\n".join(lines) + "\n"


def n_rows(check, stage):
    per = {"correctness": 2, "time": 3, "sanitize": 2}.get(stage, 1)
    return len(check.of(stage)) * per + (stage == "ranks")


def main():
    p = argparse.ArgumentParser(description="Stages of check.sh")
    p.add_argument("stage", nargs="?", default="all", choices=[*STAGES, "table", "all"])
    p.add_argument("--out", default=os.environ.get("OUT") or "check-out")
    p.add_argument("--from", dest="earlier", help="a folder with results of an earlier call")
    p.add_argument("--only", default="")
    p.add_argument("--jobs", type=int, default=max(1, min(4, (os.cpu_count() or 1) // 4)),
                   help="rows of correctness and sanitize at once")
    p.add_argument("--work", default="/tmp/frit-check", help="for files that are not results")
    a = p.parse_args()
    check = Check(a)
    stages = {"correctness": check.correctness, "train": check.train_stage, "time": check.time_stage,
              "ranks": check.ranks_stage, "sanitize": check.sanitize}
    for stage, work in stages.items():
        if a.stage in (stage, "all"):
            work()
    if a.stage in ("table", "all"):
        check.table()
    rows = [row for stage in STAGES for row in check.read(stage).values()]
    return 1 if any(row["ok"] is False for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
