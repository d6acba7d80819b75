"""What the installed package must do with NumPy alone. `.ci/wheel-test` runs it in a fresh virtual environment.

The argument is a folder of models with data and PyTorch's numbers.
"""

import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

import numpy as np

import frit

STEPS = 8
SCRIPTS = Path(sys.executable).parent


def ran(*command, code=0, **options):
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False, **options)
    assert done.returncode == code, f"{command} ends with {done.returncode}:\n{done.stdout}{done.stderr}"
    return done.stdout if code == 0 else done.stderr


def the_environment_is_bare():
    names = {d.metadata["Name"].lower() for d in distributions()}
    assert names <= {"frit", "numpy", "pip", "setuptools"}, names
    assert importlib.util.find_spec("torch") is None
    assert Path(frit.__file__).is_relative_to(sys.prefix), frit.__file__
    assert not any(Path().iterdir())


def the_programs_start():
    for program, missing in (("frit", ["inspect", "none"]), ("frit-run", ["none", "--data", "none"])):
        assert ran(SCRIPTS / program, "--version") == f"{program} {frit.__version__}\n"
        assert "Usage:" in ran(SCRIPTS / program, "--help")
        assert "error" in ran(SCRIPTS / program, *missing, code=2)
    assert ran(sys.executable, "-m", "frit", "--version") == f"frit {frit.__version__}\n"
    assert "[optimizer]" in ran(SCRIPTS / "frit", "compile", "--help-config")


def read(path):
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    types = {"F32": "<f4", "I64": "<i8"}
    tensors = {n: t for n, t in json.loads(raw[8 : 8 + size]).items() if n != "__metadata__"}
    body = raw[8 + size :]
    return {
        n: np.frombuffer(body[slice(*t["data_offsets"])], types[t["dtype"]]).reshape(t["shape"])
        for n, t in tensors.items()
    }


def the_models_train(models, name):
    reference = json.loads((models / name / "reference.json").read_text())
    data, batch = read(models / name / "data.safetensors"), reference["global_batch"]
    batches = [{n: x[i * batch : (i + 1) * batch] for n, x in data.items()} for i in range(STEPS)]
    for ranks in (1, 2):
        for precision, tolerance in (("fp32", 2e-5), ("bf16", 2e-2)):
            plan = frit.compile(
                models / name / "model.onnx", loss=reference["loss"], precision=precision, ranks=ranks,
                bind={"batch": batch // ranks}, **({"model.batch_norm": "sync"} if name == "resnet" else {}),
            )  # fmt: skip
            assert "trains" in str(plan) and plan.verify() and plan._repr_html_()
            with plan.trainer(checkpoint=f"{name}-{ranks}-{precision}") as trainer:
                losses = [trainer.step(b)["loss"] for b in batches]
                evaluated = trainer.evaluate(batches)
                trainer.save("model.safetensors")
                trainer.export("model.onnx")
                state = trainer.state_dict()
            expected = reference[precision]["loss"][:STEPS]
            assert np.allclose(losses, expected, rtol=tolerance, atol=0), (name, ranks, precision, losses, expected)
            assert evaluated["loss"] > 0 and set(state) == set(plan.parameters)
            print(f"{name} on {ranks} ranks in {precision}: losses within {tolerance} of PyTorch's")


def the_command_line_trains(models):
    model = models / "gpt2"
    ran(SCRIPTS / "frit", "compile", model / "model.onnx", "--bind", "batch=4", "--set", "sharding.ranks=2", "-o", "plan")
    data = ["--data", model / "data.safetensors", "--steps", STEPS]
    ran(SCRIPTS / "frit", "run", "plan", *data, "--metrics", "a.jsonl")
    # A process per rank, as torchrun starts them.
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [str(c) for c in (SCRIPTS / "frit-run", "plan", *data, "--metrics", "b.jsonl")]
    env = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [subprocess.Popen(command, env={**env, "RANK": str(r)}, stdout=subprocess.DEVNULL) for r in range(2)]
    assert [r.wait(timeout=120) for r in ranks] == [0, 0]
    a, b = ([json.loads(line)["loss"] for line in Path(f).read_text().splitlines()] for f in ("a.jsonl", "b.jsonl"))
    assert a == b and len(a) == STEPS
    with frit.load("plan").trainer() as trainer:
        whole = read(model / "data.safetensors")
        c = [trainer.step({n: x[i * 8 : i * 8 + 8] for n, x in whole.items()})["loss"] for i in range(STEPS)]
    assert a == c
    shutil.rmtree("plan")


if __name__ == "__main__":
    models = Path(sys.argv[1])
    the_environment_is_bare()
    the_programs_start()
    for name in ("gpt2", "resnet"):
        the_models_train(models, name)
    the_command_line_trains(models)
    print(f"frit {frit.__version__} works with NumPy {np.__version__} alone on Python {sys.version.split()[0]}")
