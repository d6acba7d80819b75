#!/usr/bin/env python3
"""Write the model and the reference of tests/suite/losses.rs: one small network with three outputs, trained by PyTorch
in fp64 with every kind of loss. Run in this folder; needs torch, onnx, onnxscript and safetensors."""
import copy
import json

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

STEPS, BATCH = 5, 8


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.logits, self.values, self.grid = nn.Linear(4, 16), nn.Linear(16, 5), nn.Linear(16, 3), nn.Linear(16, 15)

    def forward(self, x):
        h = torch.tanh(self.stem(x))
        return self.logits(h), self.values(h), self.grid(h).reshape(-1, 5, 3)


def cases(out, d):
    logits, values, grid = out
    ce = F.cross_entropy
    return {
        "smoothed": (ce(logits, d["labels"], label_smoothing=0.1), ["loss.label_smoothing=0.1"]),
        "soft": (ce(logits, d["soft"], label_smoothing=0.2), ["loss.labels=soft", "loss.targets=probabilities", "loss.label_smoothing=0.2"]),
        "axis": (ce(grid, d["grid_labels"]), ["loss.logits=grid", "loss.labels=grid_labels", "loss.class_axis=1"]),
        "mse": (F.mse_loss(values, d["target"]), ["loss.kind=mse", "loss.logits=values", "loss.labels=target"]),
        "l1": (F.l1_loss(values, d["target"]), ["loss.kind=l1", "loss.logits=values", "loss.labels=target"]),
        "smooth_l1": (F.smooth_l1_loss(values, d["target"], beta=0.5), ["loss.kind=smooth_l1", "loss.beta=0.5", "loss.logits=values", "loss.labels=target"]),
        "bce": (F.binary_cross_entropy_with_logits(values, d["chance"]), ["loss.kind=bce_with_logits", "loss.logits=values", "loss.labels=chance"]),
        "kl": (F.kl_div(F.log_softmax(logits, -1), d["soft"], reduction="batchmean"), ["loss.kind=kl", "loss.labels=soft"]),
        "weighted": (0.5 * ce(logits, d["labels"]), ["loss.weight=0.5"]),
        "several": (ce(logits, d["labels"]) + 0.5 * F.mse_loss(values, d["target"]) + 0.25 * ce(grid.transpose(1, 2).reshape(-1, 5), d["grid_labels"].reshape(-1)),
                    ['loss.also=["0.5 * mse(values, target)", "0.25 * cross_entropy(turned, grid_labels)"]']),
    }


def main():
    torch.manual_seed(0)
    net, n = Net(), STEPS * BATCH
    labels, grid_labels = torch.randint(0, 5, (n,)), torch.randint(0, 5, (n, 3))
    # Ranks and losses ignore different numbers of labels.
    labels[torch.rand(n) < 0.3] = -100
    grid_labels[torch.rand(n, 3) < 0.2] = -100
    soft = torch.softmax(2 * torch.randn(n, 5), -1)
    soft[::3] = F.one_hot(torch.randint(0, 5, (len(soft[::3]),)), 5).float()
    data = {"x": torch.randn(n, 4), "labels": labels, "grid_labels": grid_labels, "soft": soft, "target": torch.randn(n, 3), "chance": torch.rand(n, 3)}
    save_file(data, "data.safetensors")

    class Exported(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, x):
            logits, values, grid = self.net(x)
            return logits, values, grid, grid.transpose(1, 2)

    torch.onnx.export(Exported(), (data["x"][:BATCH],), "model.onnx", dynamo=False, opset_version=17, do_constant_folding=False, input_names=["x"],
                      output_names=["logits", "values", "grid", "turned"], dynamic_axes={"x": {0: "batch"}})
    exact = {k: v.double() if v.is_floating_point() else v for k, v in data.items()}
    reference = {}
    for name in cases(net(data["x"]), data):
        model = copy.deepcopy(net).double()
        # Not Adam: it turns the rounding of a gradient that is exactly zero, as of l1, into a step.
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses, norms = [], []
        for step in range(STEPS):
            d = {k: v[step * BATCH:(step + 1) * BATCH] for k, v in exact.items()}
            optimizer.zero_grad()
            loss, settings = cases(model(d["x"]), d)[name]
            loss.backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
            optimizer.step()
            losses.append(float(loss.detach()))
        reference[name] = {"settings": settings, "loss": losses, "grad_norm": norms}
    with open("reference.json", "w") as file:
        json.dump(reference, file, indent=1)


main()
