"""What the rows of check.sh's stages are made from: each function runs programs of the kit and returns one row."""

import json
import math
import os
import pathlib
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time

import make_models
import tensors
from process import Cut, Failed

KIT = pathlib.Path(__file__).resolve().parent
FRIT_RUN = KIT / "bin" / "frit-run"
LLMC = KIT / "llm.c" / "train_gpt2cu"
# Largest deviation of losses, over their size, and of gradients, norm of the difference over norm.
LOSS_TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2, "fp8": 2e-2}
GRAD_TOLERANCE = {"fp32": 1e-3, "bf16": 5e-2, "fp8": 1e-1}
# The same of gradients that rounding alone changes more than that, at most.
MOST_ROUNDING = 0.2
# Another number of ranks sums in another order, but for the plans that add in the same tree on any number.
RANK_TOLERANCE, REPRODUCIBLE = 1e-4, "reproducible"
# Dense bf16 FLOP/s by what the GPU is called, from NVIDIA's data sheets.
PEAKS = {"H100 PCIe": 756e12, "H100": 989.4e12, "H200": 989.4e12, "A100": 312e12}
STEPS = {"train": 20, "time": 20, "ranks": 3}
# Steps of a timed run that are not counted, of every program.
WARM_UP = 10
# Seconds for a first start, which compiles kernels and measures what computes GEMMs and convolutions, and how many of them
# it may measure: of plans that are only checked, fewer.
FIRST_START = 240
TUNING_SECONDS = {"time": 60, "train": 60}
CHECKED_TUNING_SECONDS = 10
# Seconds for a program that is timed; compiling with all candidates measured takes longest.
PEER_SECONDS = {"max-autotune-no-cudagraphs": 420}
# Seconds within which a rank ends after another was killed.
KILLED_SECONDS = 20
# Of a model with more parameters the weights are not handed from program to program: each makes its own, alike.
SHARED_PARAMETERS = 500e6


class Rows:
    def __init__(self, check):
        self.check, self.run, self.cuda, self.work = check, check.runner.run, check.cuda, check.work

    def scratch(self, name):
        """A file of this thread's row."""
        folder = self.work / f"rows-{threading.get_native_id()}"
        folder.mkdir(exist_ok=True)
        (folder / name).unlink(missing_ok=True)
        return folder / name

    def train(self, entry, steps, *more):
        """Runs steps of an entry's plan; the lines of its metrics."""
        metrics, plan = self.scratch("metrics.jsonl"), KIT / "plans" / entry["name"]
        self.run([FRIT_RUN, plan, "--data", self.data(entry), "--steps", steps, "--metrics", metrics, *tuning(entry), *more],
                 FIRST_START)
        return read_lines(metrics)

    def data(self, entry):
        """The data file of an entry; images are made from a fixed seed."""
        if entry["data"] != "images":
            return KIT / entry["data"]
        path = self.work / f"images-{entry['model']}-{entry['batch']}.safetensors"
        if not path.exists():
            self.run([sys.executable, KIT / "peer.py", "--model", entry["model"], "--batch", entry["batch"], "--images", path])
        return path

    def weights(self, entry):
        """First values of the parameters, for all programs; none if they are too many to write and read every time."""
        sizes = model_sizes(entry["model"])
        if sizes["kind"] != "gpt2" or parameters(sizes) > SHARED_PARAMETERS:
            return None
        path = self.work / f"weights-{entry['model']}.safetensors"
        if not path.exists():
            self.train(entry, 0, "--save", path)
        return path

    def peer(self, entry, batch, steps, *more, most=200):
        """Runs the model with PyTorch; what it wrote."""
        path = self.scratch("peer.json")
        self.run([sys.executable, KIT / "peer.py", "--model", entry["model"], "--data", self.data(entry), "--batch", batch,
                  "--steps", steps, "--precision", entry["precision"], "--device", self.check.kit["device"], "--json", path,
                  *more], most)
        return json.loads(path.read_text())

    # The machine.

    def libraries(self):
        """Driver, GPU and libraries with versions and paths, as far as the first plan that is timed needs them."""
        entry = next(iter(self.check.of("time")), self.check.entries[0])
        command = [FRIT_RUN, "doctor", KIT / "plans" / entry["name"], "--json"]
        lacking = ""
        try:
            found = json.loads(self.run(command, 60))
        except Failed as e:
            if e.done is None or e.done.code != 2 or not e.done.out.startswith("{"):
                raise
            found, lacking = json.loads(e.done.out), e.done.last_line()
        self.check.software |= {f["what"]: f["found"] or f["problem"] for f in found["findings"]}
        return {"ok": not lacking, "note": lacking, **found}

    def nvidia_smi(self):
        if shutil.which("nvidia-smi") is None:
            return {"ok": None, "note": "there is no nvidia-smi"}
        fields = ["name", "driver_version", "memory.total", "memory.used", "clocks.sm", "clocks.max.sm", "clocks.mem",
                  "power.limit", "temperature.gpu", "compute_mode"]
        values = self.run(["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"], 30).strip()
        self.check.software["nvidia-smi"] = values.splitlines()[0]
        return {"ok": True, "note": values, "all": self.run(["nvidia-smi"], 30)}

    def pytorch(self):
        found = json.loads(self.run([sys.executable, KIT / "peer.py", "--versions"], 120))
        self.check.software["PyTorch"] = ", ".join(f"{k} {v}" for k, v in found.items())
        return {"ok": True, "note": self.check.software["PyTorch"]}

    def ceilings(self):
        if not self.cuda:
            return {"ok": None, "note": "not run: no plans for a GPU"}
        found = json.loads(self.run([FRIT_RUN, "doctor", "--measure", "--json"], 120))["ceilings"]
        rate, bandwidth = found["gemm_flops_per_s"] / 1e12, found["copy_bytes_per_s"] / 1e9
        return {"ok": True, "note": f"bf16 GEMM {rate:.0f} TFLOP/s, copy {bandwidth:.0f} GB/s", **found}

    # Correctness.

    def kernels(self, entry):
        """Every kernel of the plan beside the interpreter, on the device's own operands."""
        plan = KIT / "plans" / entry["name"]
        command = [FRIT_RUN, "compare", plan, "--data", KIT / entry["data"], "--json", *tuning(entry)]
        try:
            found = json.loads(self.run(command, FIRST_START))
        except Failed as e:
            # With exit code 1 the comparison ended, and some kernels are far.
            if e.done is None or e.done.code != 1 or not e.done.out.startswith("{"):
                raise
            found = json.loads(e.done.out)
        for k in found["kernels"]:
            k["error"] = math.inf if k["error"] is None else k["error"]
        far = [k for k in found["kernels"] if not k["error"] <= k["tolerance"]]
        worst = max(found["kernels"], key=lambda k: k["error"] / (k["tolerance"] or 1), default=None)
        note = "; ".join([describe_kernel(k) for k in far[:3]] + ([f"and {len(far) - 3} more"] if len(far) > 3 else []))
        if found["left_out"]:
            note += f"; not compared: {', '.join(found['left_out'])}"
        return {"ok": not far and not found["left_out"], "compared": len(found["kernels"]), "far": far,
                "left_out": found["left_out"], "worst": worst, "note": note.removeprefix("; ")}

    def steps(self, entry):
        """Losses of five steps, the gradients of the first, and the loss of validation after the last beside the CPU's."""
        grads, data = self.scratch("grads.safetensors"), KIT / entry["data"]
        reference = KIT / "references" / entry["name"]
        expected = tensors.losses(read_lines(reference / "metrics.jsonl"))
        validation = ["--validation", data] if len(expected) > 5 else []
        found = tensors.losses(self.train(entry, 5, "--dump-grads", grads, *validation))
        loss, step = tensors.largest_deviation(found, expected)
        grad, worst = tensors.compare(grads, reference / "grads.safetensors")
        precision, allowed = entry["precision"], GRAD_TOLERANCE[entry["precision"]]
        exact = KIT / "references" / f"{entry['model']}-fp32" / "grads.safetensors"
        if grad > allowed and precision != "fp32" and exact.exists():
            # Where rounding alone changes the gradients more, as behind normalization over few examples, the CPU's are no
            # closer to exact ones either.
            allowed = max(allowed, min(tensors.compare(reference / "grads.safetensors", exact)[0], MOST_ROUNDING))
        ok = loss <= LOSS_TOLERANCE[precision] and grad <= allowed
        note = f"losses differ by {loss:.1e} (most in step {step}), gradients by {grad:.1e}"
        if worst:
            note += (f", most in `{worst['name']}`: {worst['error']:.1e} of its largest at {worst['at']}, {worst['found']} "
                     f"instead of {worst['expected']}")
        return {"ok": ok, "loss_deviation": loss, "loss_step": step, "grad_deviation": grad, "grad_tolerance": allowed, "worst": worst,
                "losses": found, "expected_losses": expected, "note": "" if ok else note}

    def training(self, entry):
        """The losses of training beside PyTorch's, from the same weights over the same data."""
        steps, weights = STEPS["train"], self.weights(entry)
        found = tensors.losses(self.train(entry, steps))
        same = self.peer(entry, entry["batch"], steps, "--weights", weights)["losses"]
        exact = self.peer(entry | {"precision": "fp32"}, entry["batch"], steps, "--weights", weights)["losses"]
        deviation, peers = tensors.mean_deviation(found, exact), tensors.mean_deviation(same, exact)
        allowed = LOSS_TOLERANCE["fp32"] if entry["precision"] == "fp32" else 1.5 * peers + 1e-4
        ok = deviation <= allowed and found[-1] < found[0]
        _, step = tensors.largest_deviation(found, exact)
        return {"ok": ok, "losses": found, "pytorch_losses": same, "pytorch_fp32_losses": exact,
                "deviation_from_fp32": deviation, "pytorch_deviation_from_fp32": peers, "worst_step": step,
                "note": f"deviation from PyTorch fp32 {deviation:.1e} (most in step {step}), PyTorch's own {peers:.1e}"}

    # Time.

    def first(self, entry):
        """One step, whose start compiles the plan's kernels and measures what computes its GEMMs."""
        usage, begin = self.scratch("usage.json"), time.monotonic()
        found = tensors.losses(self.train(entry, 1, "--usage", usage))
        used = json.loads(usage.read_text())
        ok = len(found) == 1 and math.isfinite(found[0])
        return {"ok": ok, "loss": found, "first_start_s": time.monotonic() - begin, "device_bytes": used.get("device_bytes"),
                "note": f"loss {found}"}

    def time_frit(self, entry):
        usage, trace = self.scratch("usage.json"), self.scratch("trace.json")
        found = self.train(entry, STEPS["time"], "--usage", usage)
        step_s = statistics.median(step_seconds(entry, found)[WARM_UP:])
        used = json.loads(usage.read_text())
        row = {"step_s": step_s, "warm_up": WARM_UP, "device_bytes": used.get("device_bytes"),
               "peak_allocated_bytes": sum(used[f"{x}_bytes"] for x in ("persistent", "workspace", "extra")),
               "kernels": sum(used["launches"].values()), "launches": used["launches"],
               "graph_launches": used.get("graph_launches"), "losses": tensors.losses(found)}
        try:
            self.train(entry, 3, "--trace", trace)
            busy, tasks = read_trace(trace)
            row |= {"gap": max(0.0, 1 - busy / step_s), "tasks": tasks}
        except Failed as e:
            row["trace"] = str(e)
        return self.rates(entry, entry["batch"], row)

    def time_peer(self, entry, mode):
        more = ["--mode", mode, "--pad-vocab", "--profile"]
        weights = self.weights(entry)
        if weights:
            more += ["--weights", weights]

        def attempt(batch):
            return self.peer(entry, batch, STEPS["time"], *more, most=PEER_SECONDS.get(mode, 300))

        return self.as_large_as_possible(entry, attempt)

    def time_llmc(self, entry):
        """llm.c's own timing of its steps, by CUDA events; the better of GELU in the GEMMs and as kernels."""
        if not self.cuda or not LLMC.exists():
            why = self.check.kit.get("llm.c") or "it is not in the kit"
            return {"ok": None, "note": f"not run: {why}" if self.cuda else "not run: no plans for a GPU"}
        sizes = model_sizes(entry["model"])
        data = self.work / "tokens-llmc.bin"
        write_llmc_tokens(KIT / entry["data"], data)
        # Without weights of ours, those that llm.c draws for a model of so many layers.
        model, weights = f"d{sizes['layers']}", self.weights(entry)
        if weights:
            model = self.work / f"{entry['model']}-llmc.bin"
            if not model.exists():
                self.run([sys.executable, KIT / "llmc.py", entry["model"], weights, model])
        libraries = ":".join(filter(None, [self.check.wheels, os.environ.get("LD_LIBRARY_PATH")]))

        def one(batch, gelu):
            # Neither validation nor samples between the steps; no recomputation; f32 master weights; TF32 where f32 is used.
            command = [LLMC, "-i", data, "-j", data, "-e", model, "-b", batch, "-t", sizes["seq"], "-x", STEPS["time"],
                       "-v", 10 * STEPS["time"], "-m", 1, "-s", 0, "-k", "constant", "-l", "1e-4", "-c", "0.01", "-r", 0,
                       "-w", 1, "-f", 1, "-ge", gelu]
            text = self.run(command, 200, LD_LIBRARY_PATH=libraries)
            steps = re.findall(r"^step +\d+/\d+ \| loss ([\d.naif]+).*?\| ([\d.]+) ms \|", text, re.M)
            if len(steps) != STEPS["time"]:
                raise Failed(f"llm.c reported {len(steps)} steps")
            first = re.search(r"^val loss ([\d.naif]+)", text, re.M)
            return {"step_s": statistics.median(float(ms) for _, ms in steps[WARM_UP:]) / 1e3, "warm_up": WARM_UP,
                    "losses": [float(loss) for loss, _ in steps], "first_loss": first and float(first[1]), "gelu_fusion": gelu}

        def attempt(batch):
            return min((one(batch, gelu) for gelu in (0, 2)), key=lambda found: found["step_s"])

        return self.as_large_as_possible(entry, attempt)

    def as_large_as_possible(self, entry, attempt):
        """A batch that is too large for a peer is halved for it."""
        batch = entry["batch"]
        while True:
            try:
                return self.rates(entry, batch, attempt(batch))
            except Failed as e:
                said = f"{e} {e.done.err[-4000:] if e.done else ''} {e.done.out[-4000:] if e.done else ''}"
                if "out of memory" not in said or batch == 1:
                    raise
                batch //= 2

    def rates(self, entry, batch, row):
        examples, flops = per_example(entry["model"])
        row["batch"] = batch
        row["rate"] = batch * examples / row["step_s"]
        gpu = self.check.software.get("GPU 0", "")
        peak = next((p for name, p in PEAKS.items() if name in gpu), None) if self.cuda else None
        row["mfu"] = batch * flops / row["step_s"] / peak if peak else None
        mfu = f", MFU {row['mfu']:.1%}" if peak else ""
        sdpa = f", attention by {row['sdpa']}" if row.get("sdpa") else ""
        return {"ok": True, "note": f"{row['rate']:.0f} {unit(entry)}/s, {row['step_s'] * 1e3:.2f} ms, batch {batch}{mfu}{sdpa}"} | row

    # Ranks that share the GPU.

    def one_rank(self, entry):
        found = self.processes(entry, STEPS["ranks"])
        return {"ok": len(found) == STEPS["ranks"], "losses": found, "note": f"losses {found}"}

    def ranks(self, entry, one, **environment):
        expected = self.check.known["ranks"].get(one["name"], {}).get("losses")
        if expected is None:
            raise Failed("one rank gave no losses to compare with")
        found = self.processes(entry, STEPS["ranks"], **environment)
        deviation, step = tensors.largest_deviation(found, expected)
        allowed = 0.0 if entry["model"] == REPRODUCIBLE else RANK_TOLERANCE
        return {"ok": deviation <= allowed, "losses": found, "deviation": deviation,
                "note": f"losses differ from one rank's by {deviation:.1e} (most in step {step})"}

    def processes(self, entry, steps, **environment):
        """Every rank as a process on the same GPU; rank 0's losses."""
        limit, _ = self.check.runner.limit(200)
        metrics = self.scratch("metrics.jsonl")
        started = self.start(entry, steps, metrics, environment)
        end = time.monotonic() + limit
        try:
            for rank, (process, said) in enumerate(started):
                try:
                    code = process.wait(max(0.0, end - time.monotonic()))
                except subprocess.TimeoutExpired:
                    raise Failed(f"the ranks did not end after {limit:.0f} s; rank {rank}: {last_lines(said)}") from None
                if code:
                    raise Failed(f"rank {rank} ended with {code}: {last_lines(said)}")
        finally:
            for process, _ in started:
                self.check.runner.kill(process)
        return tensors.losses(read_lines(metrics))

    def start(self, entry, steps, metrics, environment):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        command = [FRIT_RUN, KIT / "plans" / entry["name"], "--data", KIT / entry["data"], "--steps", steps, "--metrics", metrics,
                   *tuning(entry)]
        n = entry["ranks"]
        place = {"WORLD_SIZE": n, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "FRIT_TIMEOUT": 60, "NCCL_DEBUG": "WARN"}
        started = []
        for rank in range(n):
            # NCCL takes ranks that name different hosts for different machines, and lets them share a GPU.
            own = place | {"RANK": rank, "LOCAL_RANK": rank, "NCCL_HOSTID": f"check-{rank}"} if n > 1 else {}
            said = tempfile.TemporaryFile("w+b")
            process = self.check.runner.start(command, own | environment, stdin=subprocess.DEVNULL, stdout=said, stderr=said)
            started.append((process, said))
        return started

    def killed(self, entry):
        """A rank that is killed ends the others with exit code 2 and a sentence."""
        limit, _ = self.check.runner.limit(150)
        metrics, end = self.scratch("metrics.jsonl"), time.monotonic() + limit
        started = self.start(entry, 1_000_000, metrics, {})
        (first, said), (last, _) = started[0], started[-1]
        try:
            while not (metrics.exists() and len(metrics.read_text().splitlines()) > 2):
                if time.monotonic() > end or first.poll() is not None:
                    raise Failed(f"the ranks did not start: {last_lines(said)}")
                time.sleep(0.05)
            last.send_signal(signal.SIGKILL)
            begin = time.monotonic()
            try:
                code = first.wait(min(KILLED_SECONDS, max(0.0, end - begin)))
            except subprocess.TimeoutExpired:
                if end - begin < KILLED_SECONDS:
                    raise Cut("not run: no time left") from None
                raise Failed(f"rank 0 hangs after another rank was killed: {last_lines(said)}; {self.stack(first)}") from None
            after, text = time.monotonic() - begin, last_lines(said)
            return {"ok": code == 2 and "rank" in text, "note": f"rank 0 ended with {code} after {after:.1f} s: {text}"}
        finally:
            for process, _ in started:
                self.check.runner.kill(process)

    def stack(self, process):
        """The calls in which the threads of a process are, as far as there is a debugger."""
        debugger = next(filter(None, map(shutil.which, ("gdb", "cuda-gdb"))), None)
        if debugger is None:
            return "there is no gdb to say where"
        try:
            said = self.run([debugger, "-p", process.pid, "-batch", "-ex", "thread apply all backtrace 16"], 20)
        except Failed as e:
            return f"gdb: {e}"
        return " / ".join(line.strip() for line in said.splitlines() if re.match(r"#|Thread ", line))[:6000]

    def sanitized(self, entry, tool):
        program = shutil.which("compute-sanitizer") or next(
            (str(p) for p in pathlib.Path("/usr/local").glob("cuda*/bin/compute-sanitizer")), None)
        if not self.cuda or program is None:
            return {"ok": None, "note": "not run: no plans for a GPU" if not self.cuda else "not run: there is no compute-sanitizer"}
        command = [program, "--tool", tool, "--error-exitcode", 9, FRIT_RUN, KIT / "plans" / entry["name"], "--data",
                   KIT / entry["data"], "--steps", 3, *tuning(entry)]
        summary = [line for line in self.run(command, 300).splitlines() if "SUMMARY" in line]
        return {"ok": True, "note": " ".join(summary)}


def tuning(entry):
    # Every number of ranks makes the same choices when nothing is measured.
    if entry["model"] == REPRODUCIBLE:
        return []
    return ["--tuning-seconds", TUNING_SECONDS.get(entry["stage"], CHECKED_TUNING_SECONDS)]


def describe_kernel(k):
    text = f"{k['kernel']} ({k['ops']}) in task `{k['task']}`: error {k['error']:.1e}, allowed {k['tolerance']:.1e}"
    if w := k.get("worst"):
        text += f", `{w['buffer']}` at {w['index']} is {w['found']} instead of {w['expected']}"
    return text


def read_lines(path):
    return [json.loads(line) for line in pathlib.Path(path).read_text().splitlines()] if pathlib.Path(path).exists() else []


def last_lines(file):
    file.seek(0)
    lines = [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    return " / ".join(lines[-2:])[:600]


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
    longest = sorted(by_name.values(), key=lambda row: -row["s"])[:60]
    return sum(e["dur"] for e in events) / 1e6, longest


def write_llmc_tokens(tokens, path):
    """The tokens with llm.c's header: a magic number, the version, how many they are."""
    body = pathlib.Path(tokens).read_bytes()
    header = [20240520, 1, len(body) // 2] + [0] * 253
    path.write_bytes(b"".join(x.to_bytes(4, "little") for x in header) + body)


def model_sizes(name):
    return {**make_models.MODELS, **make_models.TINY}[name]


def parameters(sizes):
    """Of a transformer, position embeddings left out."""
    layers, width = sizes["layers"], sizes["width"]
    return layers * (12 * width ** 2 + 13 * width) + sizes["vocab"] * width


def per_example(name):
    """Tokens (or images) of an example, and the FLOP of a training step for it.

    A token costs six FLOP per parameter, position embeddings left out, and 12 · layers · width · seq for attention, as
    in the PaLM paper; an image three times the two FLOP of each multiplication of the forward pass.
    """
    sizes = model_sizes(name)
    if sizes["kind"] != "resnet":
        seq = sizes["seq"]
        return seq, seq * (6 * parameters(sizes) + 12 * sizes["layers"] * sizes["width"] * seq)
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
