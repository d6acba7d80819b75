"""What the tests share: models of the repository, data, and the command line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import frit

MODELS = Path(__file__).parents[3] / "tests" / "models"
TYPES = {"F32": "<f4", "F64": "<f8", "F16": "<f2", "I64": "<i8", "I32": "<i4", "BOOL": "?", "U8": "<u1"}


def read_safetensors(path):
    """The tensors of a file by name."""
    raw = Path(path).read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header, body = json.loads(raw[8 : 8 + size]), raw[8 + size :]
    header.pop("__metadata__", None)
    return {
        name: np.frombuffer(body[slice(*t["data_offsets"])], TYPES[t["dtype"]]).reshape(t["shape"])
        for name, t in header.items()
    }


def command(*arguments, code=0):
    """What the program `frit` prints, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "frit", *map(str, arguments)], capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stderr
    return done.stdout if code == 0 else done.stderr


def metrics_of(path):
    """The lines of a file of metrics."""
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


class Model:
    """A test model with its data and reference."""

    def __init__(self, name):
        self.path = MODELS / name / "model.onnx"
        self.data_path = MODELS / name / "data.safetensors"
        self.data = read_safetensors(self.data_path)
        self.reference = json.loads((MODELS / name / "reference.json").read_text())
        self.batch = self.reference["global_batch"]
        self.steps = self.reference["steps"]

    def batches(self, steps=None, start=0, size=None):
        size = size or self.batch
        for step in range(start, steps or self.steps):
            yield {name: x[step * size : (step + 1) * size] for name, x in self.data.items()}

    def compile(self, **options):
        ranks = options.get("ranks") or 1
        options = {"loss": self.reference["loss"], "precision": "fp32", **options}
        return frit.compile(self.path, bind={"batch": self.batch // ranks}, **options)


@pytest.fixture(scope="session")
def models():
    return {name: Model(name) for name in ("gpt2", "llama", "resnet", "mlp")}


@pytest.fixture(scope="session")
def mlp(models):
    return models["mlp"]


@pytest.fixture(scope="session")
def plan(mlp):
    """The plan of the smallest model."""
    return mlp.compile()


@pytest.fixture(scope="session")
def losses(mlp, plan):
    """Its losses."""
    return run(plan, mlp.batches(8))


def run(plan, batches, **options):
    """The losses of a fresh trainer over batches."""
    with plan.trainer(**options) as trainer:
        return [trainer.step(batch)["loss"] for batch in batches]


def skip_without(requirement, request, reason):
    """Skips a test, which is counted; it fails where FRIT_REQUIRE names what it needs."""
    required = os.environ.get("FRIT_REQUIRE", "").split(",")
    assert not {requirement, "all"} & set(required), f"{requirement} is required: {reason}"
    if "FRIT_SKIPPED" in os.environ:
        with open(os.environ["FRIT_SKIPPED"], "a") as file:
            file.write(f"{requirement}: {request.node.nodeid}\n")
    pytest.skip(reason)


@pytest.fixture
def torch(request):
    """The module torch."""
    try:
        import onnxscript  # noqa: F401
        import torch as found
    except ImportError:
        skip_without("torch", request, "needs torch and onnxscript")
    return found
