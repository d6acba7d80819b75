#!/usr/bin/env python3
"""Times Frit's training steps on the CPU beside PyTorch's: the tables of docs/performance.md.

    cpu.sh [--models gpt2,resnet50] [--precisions bf16] [--modes eager] [--recompute none] [--rounds 9] [--threads 2] [--out results.json]

Seven models (and others, if named) with random weights, in fp32 and bf16 (autocast), AdamW, gradients clipped to a norm of 1. Each contestant is a process
of its own with the same batch; in every round each takes one step in turn while the others sleep. PyTorch runs eager and under
torch.compile (module and loss together), with fused AdamW, and images in channels_last; its faster mode counts. Before each model
the machine's ceilings are measured by `frit calibrate`.

Columns: median wall and processor seconds of a step; ratios are PyTorch's over Frit's, so above 1 Frit is ahead. Peak resident memory,
Frit's over PyTorch's. `limit`: the seconds that the model's arithmetic takes at the machine's peak, over those that it took;
`predicted`: those of `frit simulate` over those that it took. The last column is how far the first losses are apart.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
SEVEN = ["gpt2", "bert", "llama", "t5", "vit", "resnet50", "unet"]
OTHERS = ["convnext", "mobilenet", "segformer", "swin", "deberta", "whisper", "mamba", "lstm", "mlp"]


def arguments():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = lambda known: lambda text: [n for n in text.split(",") if n in known or p.error(f"{n} is none of {', '.join(known)}")]
    others = f"by name, with commas (default: the seven {','.join(SEVEN)}); others: {','.join(OTHERS)}"
    p.add_argument("--models", type=names(SEVEN + OTHERS), default=SEVEN, help=others)
    p.add_argument("--precisions", type=names(["fp32", "bf16"]), default=["fp32", "bf16"])
    p.add_argument("--modes", type=names(["eager", "compile"]), default=["eager", "compile"], help="PyTorch's (default: both)")
    p.add_argument("--recompute", choices=["none", "selective"], default="selective", help="Frit's memory.recompute; torch.compile is selective (default: %(default)s)")
    p.add_argument("--rounds", type=int, default=7, help="timed steps of each contestant (default: %(default)s)")
    p.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="default: %(default)s")
    p.add_argument("--plans", help="folder in which plans are kept, and used again (default: a temporary one)")
    p.add_argument("--out", default="cpu.json", help="all numbers, as JSON (default: %(default)s)")
    p.add_argument("--frit", default="frit", help="the program (default: %(default)s)")
    return p.parse_args()


class Contestant:
    """A process that takes steps when asked."""

    def __init__(self, name, *arguments):
        self.name, self.steps = name, []
        command = [sys.executable, f"{HERE}/cpu_worker.py", *map(str, arguments)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.ready = self.read()
        self.first = self.read()["loss"]

    def read(self):
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"cpu.py: {self.name} ended with status {self.process.wait()}; its output is above")
        return json.loads(line)

    def step(self, timed):
        self.process.stdin.write("run 1\n")
        self.process.stdin.flush()
        found = self.read()
        if timed:
            self.steps.append(found)

    def close(self):
        self.process.stdin.close()
        self.peak = self.read()["peak"]
        self.process.wait()

    def numbers(self):
        median = lambda key: statistics.median(s[key] for s in self.steps)
        loss = [self.first, self.steps[-1]["loss"]]
        return {"wall": median("wall"), "cpu": median("cpu"), "peak": self.peak, "loss": loss, "steps": self.steps, **self.ready}


def json_of(*command):
    return json.loads(subprocess.run(list(map(str, command)), check=True, stdout=subprocess.PIPE, text=True).stdout)


def measure(a, name, precision, folder):
    if not os.path.exists(f"{folder}/batch.npz"):
        os.makedirs(folder, exist_ok=True)
        subprocess.run([sys.executable, f"{HERE}/cpu_worker.py", "prepare", name, precision, a.recompute, folder], check=True, stdout=subprocess.DEVNULL)
    # The ceilings of the minute in which the steps run.
    ceilings = json_of(a.frit, "calibrate", "--threads", a.threads, "-o", f"{folder}/cpu.toml", "--json")
    predicted = json_of(a.frit, "simulate", f"{folder}/plan", "--cluster", f"{folder}/cpu.toml", "--json")
    contestants = [Contestant("frit", "frit", folder, a.threads)]
    contestants += [Contestant(mode, mode, name, precision, a.threads) for mode in a.modes]
    for round_ in range(1 + a.rounds):
        for contestant in contestants:
            contestant.step(timed=round_ > 0)
    for contestant in contestants:
        contestant.close()
    limit = predicted["model_flops"] / ceilings["bf16_flops" if precision == "bf16" else "f32_flops"]
    found = {c.name: c.numbers() for c in contestants}
    return {"limit": limit, "predicted": predicted["step_seconds"], "ceilings": ceilings, **found}


def main():
    a = arguments()
    rows = []
    print(f"{'':22}{'wall':>8}{'PyTorch':>9}{'ratio':>7}{'cpu':>9}{'PyTorch':>9}{'ratio':>7}{'memory':>8}{'limit':>7}{'predicted':>11}{'loss':>9}")
    with tempfile.TemporaryDirectory() as temporary:
        for name in a.models:
            for precision in a.precisions:
                found = measure(a, name, precision, f"{a.plans or temporary}/{name}-{precision}")
                rows.append({"model": name, "precision": precision, **found})
                ours, peers = found["frit"], [found[mode] for mode in a.modes]
                wall, cpu, peak = (min(p[k] for p in peers) for k in ("wall", "cpu", "peak"))
                off = abs(ours["loss"][0] / peers[0]["loss"][0] - 1)
                peer = min(a.modes, key=lambda mode: found[mode]["wall"])
                print(
                    f"{name + ' ' + precision + ' ' + peer:22}{ours['wall']:8.3f}{wall:9.3f}{wall / ours['wall']:7.2f}"
                    f"{ours['cpu']:9.3f}{cpu:9.3f}{cpu / ours['cpu']:7.2f}{ours['peak'] / peak:8.2f}"
                    f"{found['limit'] / ours['wall']:7.2f}{found['predicted'] / ours['wall']:11.2f}{off:9.0e}",
                    flush=True,
                )
                rows[-1].update(wall_ratio=wall / ours["wall"], cpu_ratio=cpu / ours["cpu"], memory_ratio=ours["peak"] / peak)
                with open(a.out, "w") as out:
                    json.dump(rows, out, indent=1)
    for precision in a.precisions:
        for kind in ("wall", "cpu"):
            ratios = [r[f"{kind}_ratio"] for r in rows if r["precision"] == precision]
            print(f"{precision}: geometric mean of {kind} ratios {math.prod(ratios) ** (1 / len(ratios)):.2f}, least {min(ratios):.2f}")


if __name__ == "__main__":
    main()
