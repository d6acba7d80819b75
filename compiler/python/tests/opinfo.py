"""Compiles the operators of torch's own database one by one, and compares loss and gradients with torch's.

`python opinfo.py [--archive | --decomposed] [--samples N] [OPERATOR ...]`, with torch, onnx, onnxscript, expecttest and scipy. Each sample
is a module whose tensors are parameters and whose loss is a weighted sum of the results; it is compiled from ONNX, or from the archive of
`torch.export`. Prints what differs, what is refused and how many agree. Results that are random differ, and so do gradients that torch
rounds to 16 bits.
"""

import argparse
import collections
import tempfile
import warnings
from pathlib import Path

import numpy as np
import torch
from torch.testing._internal.common_methods_invocations import op_db

import frit

SGD = {"kind": "sgd", "lr": 1.0, "momentum": 0.0, "weight_decay": 0.0, "clip_grad_norm": 1e30}
OPTIONS = {"loss": "output", "precision": "fp32", "optimizer": SGD, "schedule": {"kind": "constant"}}


class Sample(torch.nn.Module):
    """An operator with its arguments, the tensors of floats as parameters."""

    def __init__(self, operator, sample):
        super().__init__()
        self.operator, self.count = operator, 0
        self.arguments = self.kept((sample.input, sample.args, sample.kwargs))
        self.factor = torch.nn.Parameter(torch.ones(()))
        with torch.no_grad():
            results = self.results()
        for i, y in enumerate(results):
            weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(i))
            self.register_buffer(f"weights{i}", weights)

    def kept(self, x):
        if isinstance(x, torch.Tensor):
            name, self.count = f"x{self.count}", self.count + 1
            x = x.detach().clone().contiguous()
            if x.is_floating_point():
                self.register_parameter(name, torch.nn.Parameter(x))
            else:
                self.register_buffer(name, x)
            return lambda: getattr(self, name)
        if isinstance(x, (tuple, list)):
            all, kind = [self.kept(y) for y in x], type(x)
            return lambda: kind([y() for y in all])
        if isinstance(x, dict):
            entries = {k: self.kept(y) for k, y in x.items()}
            return lambda: {k: y() for k, y in entries.items()}
        return lambda: x

    def results(self):
        first, rest, named = self.arguments()
        y = self.operator(first, *rest, **named)
        all = [z for z in (y if isinstance(y, (tuple, list)) else [y]) if isinstance(z, torch.Tensor)]
        return [torch.view_as_real(z) if z.is_complex() else z for z in all]

    def forward(self, scale):
        sums = [(y.float() * getattr(self, f"weights{i}")).sum() for i, y in enumerate(self.results())]
        return {"loss": sum(sums) * self.factor * scale.mean()}


def compiled(module, scale, options):
    if not (options.archive or options.decomposed):
        return frit.compile(module, (scale,), **OPTIONS)
    program = torch.export.export(module, (scale,))
    if options.decomposed:
        program = program.run_decompositions()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.pt2"
        torch.export.save(program, file)
        return frit.compile(file, **OPTIONS)


def compared(operator, sample, options):
    """What became of a sample, and in which way."""
    module, scale = Sample(operator, sample), torch.full((2,), 0.5)
    loss = module(scale)["loss"]
    loss.backward()
    wanted = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in module.named_parameters()}
    tensors = [loss, *module.parameters(), *wanted.values()]
    if any(x.numel() == 0 or not torch.isfinite(x).all() for x in tensors):
        return "not comparable", ""
    plan = compiled(module, scale, options)
    with plan.trainer() as trainer:
        found = trainer.step([scale.numpy()])["loss"]
        state = trainer.state_dict(framework="numpy")
    if abs(found - loss.item()) > 1e-4 * max(1, abs(loss.item())):
        return "differs", f"loss {found}, not {loss.item()}"
    for name, parameter in module.named_parameters():
        before, gradient = parameter.detach().numpy(), wanted[name].numpy()
        error = np.abs(before - state.get(name, before) - gradient).max()
        # The update is rounded as the parameter is.
        allowed = 2e-4 * max(np.abs(gradient).max(), 1e-3) + 3e-7 * max(np.abs(before).max(), np.abs(gradient).max())
        if not error <= allowed:
            return "differs", f"gradient of {name} by {error}, of {np.abs(gradient).max()}"
    return "agrees", ""


def main():
    warnings.filterwarnings("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--archive", action="store_true", help="from torch.export's archive")
    parser.add_argument("--decomposed", action="store_true", help="the same, decomposed")
    parser.add_argument("--samples", type=int, default=3, metavar="N", help="of each operator at most (3)")
    parser.add_argument("operators", nargs="*", help="names, or what they begin with before a dot; all by default")
    options = parser.parse_args()
    counts = collections.Counter()
    for entry in op_db:
        name = ".".join(filter(None, [entry.name, entry.variant_test_name]))
        asked = [o for o in options.operators if name == o or name.startswith(f"{o}.")]
        if torch.float32 not in entry.dtypes or (options.operators and not asked):
            continue
        torch.manual_seed(0)
        samples = list(entry.sample_inputs("cpu", torch.float32))
        step = max(1.0, len(samples) / options.samples)
        for i in range(min(options.samples, len(samples))):
            torch.manual_seed(1)
            try:
                outcome, why = compared(entry.op, samples[int(i * step)], options)
            except frit.FritError as error:
                outcome, why = "refused", str(error).partition("\n")[0]
            except Exception as error:  # torch's own, of operators that it cannot trace or differentiate
                outcome, why = "torch fails", f"{type(error).__name__}: {error}".partition("\n")[0]
            counts[outcome] += 1
            if outcome in ("differs", "refused"):
                print(f"{name} {i}: {outcome}: {why}", flush=True)
    print(dict(counts))


if __name__ == "__main__":
    main()
