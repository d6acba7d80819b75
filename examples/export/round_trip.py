#!/usr/bin/env python3
"""Check that a model trained by Frit gives equal outputs in `frit eval`, in onnxruntime after `frit export`, and, for models
that --modules can build, in PyTorch with the trained weights under its own names.

    python round_trip.py MODEL_DIR [MODEL_DIR ...] [--frit target/release/frit] [--modules export_models.py] [--steps 20]

MODEL_DIR contains model.onnx, data.safetensors (inputs and labels) and reference.json (its loss, "cross_entropy" or "mse",
and the batch), as tests/models has them. --modules names a Python file whose `build(NAME, generator)` gives the PyTorch
module of the folder NAME first. Everything is computed in fp32, in inference mode, on the first three examples; the largest
difference of any output is printed, and the exit code is 1 if one is above 1e-5. Needs numpy, onnx, onnxruntime,
safetensors, and torch for --modules.
"""
import argparse
import importlib.util
import json
import pathlib
import subprocess
import sys
import tempfile

import numpy as np
import onnx
import onnxruntime
from safetensors.numpy import load_file, save_file

EXAMPLES, LIMIT = 3, 1e-5


def arguments():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("models", type=pathlib.Path, nargs="+", metavar="MODEL_DIR",
                   help="folders with model.onnx, data.safetensors and reference.json")
    p.add_argument("--frit", default="target/release/frit", help="the program frit")
    p.add_argument("--modules", type=pathlib.Path, help="a Python file with build(NAME, generator)")
    p.add_argument("--steps", type=int, default=20, help="training steps before the comparison")
    return p.parse_args()


def inference(model):
    """The model with batch normalization as in inference."""
    for node in model.graph.node:
        if node.op_type == "BatchNormalization":
            del node.output[1:]
            for attribute in node.attribute:
                if attribute.name == "training_mode":
                    attribute.i = 0
    return model


def run_onnx(path, data):
    session = onnxruntime.InferenceSession(inference(onnx.load(path)).SerializeToString(), providers=["CPUExecutionProvider"])
    names = [o.name for o in session.get_outputs()]
    return session.run(names, {i.name: data[i.name] for i in session.get_inputs()})


def run_torch(modules, name, weights, data):
    import torch
    net, inputs = modules.build(name, torch.Generator().manual_seed(1))[:2]
    own = net.state_dict(keep_vars=True)
    # A tied parameter was saved under one of its names.
    tensors = {id(own[k]): torch.from_numpy(v.copy()) for k, v in weights.items() if k in own}
    missing = [k for k, v in own.items() if id(v) not in tensors and v.is_floating_point()]
    assert not missing, f"{name}: no weights for {missing}"
    net.load_state_dict({k: tensors.get(id(v), v) for k, v in own.items()})
    with torch.no_grad():
        return [net.eval()(*[torch.from_numpy(data[k]) for k in inputs]).numpy()]


def check(folder, args, modules, work):
    reference = json.loads((folder / "reference.json").read_text())
    batch = reference["global_batch"]
    trained, outputs, exported = work / "trained.safetensors", work / "outputs.safetensors", work / "trained.onnx"
    first = work / "first.safetensors"
    data = {k: np.ascontiguousarray(v[:EXAMPLES]) for k, v in load_file(folder / "data.safetensors").items()}
    save_file(data, first)
    frit = lambda *words: subprocess.run([args.frit, *map(str, words)], check=True, stdout=subprocess.DEVNULL)
    frit("compile", folder / "model.onnx", "--bind", f"batch={batch}", "--set", "precision.compute=fp32",
         "--set", f"loss.kind={reference['loss']}", "-o", work / "plan")
    frit("run", work / "plan", "--data", folder / "data.safetensors", "--steps", args.steps, "--save", trained)
    frit("eval", work / "plan", "--data", first, "--weights", trained, "--dump-outputs", outputs)
    frit("export", work / "plan", "--weights", trained, "-o", exported)
    ours = list(load_file(outputs).values())
    worst = {"onnxruntime": run_onnx(exported, data)}
    if modules:
        worst["PyTorch"] = run_torch(modules, folder.name, load_file(trained), data)
    worst = {k: max(float(np.abs(a - b).max()) for a, b in zip(ours, v, strict=True)) for k, v in worst.items()}
    print(folder.name, "  ".join(f"{k} {v:.1e}" for k, v in worst.items()), flush=True)
    return max(worst.values()) <= LIMIT


def main():
    args = arguments()
    modules = None
    if args.modules:
        spec = importlib.util.spec_from_file_location("modules", args.modules)
        modules = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(modules)
    good = True
    for folder in args.models:
        with tempfile.TemporaryDirectory() as work:
            good &= check(folder, args, modules, pathlib.Path(work))
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
