"""Times the package beside the programs of the same wheel: `python speed.py MODELS [ROUNDS]`.

Both compile the same model with the same options, and take the same steps on the same data. The times of the programs' steps
are those that they report; those of the package are as reported, and from call to return. Medians count. One thread computes, so that other load on the machine
matters less; `chrt -f 10 python speed.py` keeps it away, as root.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from installed import SCRIPTS, read

import frit

STEPS = 20


def commanded(*command):
    began = time.perf_counter()
    subprocess.run([str(c) for c in command], check=True, capture_output=True)
    return time.perf_counter() - began


def measure(folder, name, rounds):
    model, data = folder / name / "model.onnx", folder / name / "data.safetensors"
    reference = json.loads((folder / name / "reference.json").read_text())
    batch, tensors = reference["global_batch"], read(data)
    batches = [{n: x[i * batch : (i + 1) * batch] for n, x in tensors.items()} for i in range(STEPS)]
    compiling, stepping, called = ([], []), ([], []), ([], [])
    with tempfile.TemporaryDirectory() as temporary:
        plan, metrics = Path(temporary) / "plan", Path(temporary) / "metrics.jsonl"
        for _ in range(rounds):
            sets = ["--set", f"loss.kind={reference['loss']}", "--set", "precision.compute=fp32"]
            bind = ["--bind", f"batch={batch}", "-o", plan]
            compiling[0].append(commanded(SCRIPTS / "frit", "compile", model, *sets, *bind))
            began = time.perf_counter()
            own = frit.compile(model, bind={"batch": batch}, loss=reference["loss"], precision="fp32")
            compiling[1].append(time.perf_counter() - began)
            metrics.unlink(missing_ok=True)
            commanded(SCRIPTS / "frit-run", plan, "--data", data, "--steps", STEPS, "--metrics", metrics, "--threads", 1)
            lines = [json.loads(line) for line in metrics.read_text().splitlines()]
            # The rate is that of the labels.
            count = tensors["labels"][:batch].size
            stepping[0].extend(count / line["tokens_or_examples_per_s"] for line in lines[3:])
            with own.trainer(evaluation=False, threads=1) as trainer:
                for step, one in enumerate(batches):
                    began = time.perf_counter()
                    found = trainer.step(one)
                    seconds = time.perf_counter() - began
                    if step >= 3:
                        stepping[1].append(count / found["tokens_or_examples_per_s"])
                        called[1].append(seconds)
    called[0].extend(stepping[0])
    for what, (theirs, ours), unit in (
        ("compile", compiling, 1),
        ("step as reported", stepping, 1000),
        ("step from call to return", called, 1000),
    ):
        a, b = statistics.median(theirs) * unit, statistics.median(ours) * unit
        print(f"{name} {what}: programs {a:.3f}, package {b:.3f} {'s' if unit == 1 else 'ms'} ({b / a:.3f})")


if __name__ == "__main__":
    folder, rounds = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 9
    for name in ("gpt2", "resnet"):
        measure(folder, name, rounds)
