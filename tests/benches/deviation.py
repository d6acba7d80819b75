#!/usr/bin/env python3
"""Deviation of low-precision training from fp64: Frit's, relative to that of PyTorch's autocast.

The test models with other seeds, 20 steps of AdamW each. PyTorch: CPU autocast, for fp16 with `torch.amp.GradScaler`;
Frit: one rank. Deviation: the mean over steps of the loss's distance from PyTorch's fp64 run. For bf16 also the error of the
first step's gradients (norm of the difference over norm), which later steps do not amplify.

    deviation.py --export export_models.py --frit target/debug/frit --out /tmp/deviation [--seeds 1 2 3 4 5]
        [--set KEY=VALUE] [MODEL ...]

Needs torch, transformers, torchvision, onnx, onnxscript, safetensors. `export_models.py` is the script that made tests/models.
"""

import argparse
import copy
import importlib.util
import json
import math
import pathlib
import subprocess

import torch
from safetensors.torch import load_file, save_file

MODELS = ["mlp", "gpt2", "llama", "bert", "t5", "vit", "resnet", "unet"]


def load(path):
    spec = importlib.util.spec_from_file_location("export_models", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train_fp16(given, net, kind, inputs, labels, batch):
    """Losses under fp16 autocast with dynamic loss scaling."""
    net = copy.deepcopy(net)
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
    scaler = torch.amp.GradScaler("cpu")
    losses = []
    for s in range(given.STEPS):
        xs, y = [v[s * batch : (s + 1) * batch] for v in inputs.values()], labels[s * batch : (s + 1) * batch]
        opt.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = given.loss_of(net, kind, xs, y)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
        losses.append(float(loss.detach()))
    return losses


def references(given, name, seed, out):
    """PyTorch's losses by mode, beside the exported model."""
    path = out / name / "modes.json"
    if not path.exists():
        torch.manual_seed(seed)
        net, inputs, labels, kind, batch = given.build(name, torch.Generator().manual_seed(seed + 1))
        given.export(out, name, net, inputs, labels, kind, batch, name in given.LEGACY)
        modes = json.loads((out / name / "reference.json").read_text())
        modes["fp16"] = {"loss": train_fp16(given, net, kind, inputs, labels, batch)}
        names = given.onnx_names(net, out / name / "model.onnx")
        first = given.train(net, kind, inputs, labels, batch, "bf16")[2]
        save_file({names[k]: g.contiguous() for k, g in first.items()}, out / name / "bf16_grads.safetensors")
        path.write_text(json.dumps(modes))
    return json.loads(path.read_text())


def frit_losses(frit, folder, loss, batch, compute, settings):
    plan, metrics = folder / f"plan_{compute}", folder / f"{compute}.jsonl"
    sets = [f"precision.compute={compute}", f"loss.kind={loss}"]
    sets += ["model.batch_norm=train"] if folder.name == "resnet" else []
    sets += settings
    args = [a for s in sets for a in ("--set", s)]
    compile_args = [frit, "compile", folder / "model.onnx", "--bind", f"batch={batch}", *args, "-o", plan]
    subprocess.run(compile_args, check=True, capture_output=True)
    run_args = [frit, "run", plan, "--data", folder / "data.safetensors", "--steps", "20", "--metrics", metrics]
    metrics.unlink(missing_ok=True)
    subprocess.run(run_args, check=True, capture_output=True)
    return [json.loads(line)["loss"] for line in metrics.read_text().splitlines()]


def gradient_errors(frit, folder):
    """Errors of the first step's gradients in bf16: Frit's and PyTorch's."""
    dumped = folder / "frit_grads.safetensors"
    dumped.unlink(missing_ok=True)
    args = [frit, "run", folder / "plan_bf16", "--data", folder / "data.safetensors", "--steps", "1", "--dump-grads", dumped]
    subprocess.run(args, check=True, capture_output=True)
    exact = load_file(folder / "grads.safetensors")
    norm = sum(float((g.double() ** 2).sum()) for g in exact.values())

    def error(path):
        found = load_file(path)
        return (sum(float(((found[k].double() - g.double()) ** 2).sum()) for k, g in exact.items()) / norm) ** 0.5

    return error(dumped), error(folder / "bf16_grads.safetensors")


def mean_distance(a, b):
    return sum(abs(x - y) for x, y in zip(a, b)) / len(a)


def geometric(xs):
    return math.exp(sum(math.log(x) for x in xs) / len(xs))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--export", required=True, help="the script that made tests/models")
    parser.add_argument("--frit", help="the program frit")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder for the results")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5], help="seeds of the models")
    parser.add_argument("--modes", nargs="+", default=["bf16", "fp16"], help="precisions: bf16, fp16")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="another setting of Frit's plans")
    parser.add_argument("models", nargs="*", default=MODELS, help="names of test models (default: all)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    given = load(args.export)
    everything = {mode: [] for mode in args.modes}
    for name in args.models or MODELS:
        ratios, gradients = {mode: [] for mode in args.modes}, []
        for seed in args.seeds:
            out = args.out / str(seed)
            modes = references(given, name, seed, out)
            if args.frit is None:
                continue
            for mode in args.modes:
                ours = frit_losses(args.frit, out / name, modes["loss"], modes["global_batch"], mode, args.set)
                exact = modes["fp64"]["loss"]
                ratios[mode].append(mean_distance(ours, exact) / mean_distance(modes[mode]["loss"], exact))
                if mode == "bf16":
                    ours, theirs = gradient_errors(args.frit, out / name)
                    gradients.append(ours / theirs)
        for mode in args.modes:
            if ratios[mode]:
                each = " ".join(f"{r:.2f}" for r in ratios[mode])
                print(f"{name} {mode}: geometric mean {geometric(ratios[mode]):.2f} of {each}", flush=True)
                everything[mode] += ratios[mode]
        if gradients:
            print(f"{name} bf16 gradients: geometric mean {geometric(gradients):.2f}, largest {max(gradients):.2f}", flush=True)
    for mode, ratios in everything.items():
        if ratios:
            print(f"all {mode}: geometric mean {geometric(ratios):.2f}, largest {max(ratios):.2f}")


if __name__ == "__main__":
    main()
