#!/usr/bin/env python3
"""Write the models of tests/suite/lost.rs: exports that lost parameters or batch normalizations of the module. Run in this folder; needs torch,
onnx and onnxscript."""
import torch
from onnx import load, save
from torch import nn


class Round(torch.autograd.Function):
    """A straight-through estimator: its backward is no part of a graph."""

    @staticmethod
    def forward(ctx, x):
        return torch.round(x)

    @staticmethod
    def backward(ctx, g):
        return g


class Between(nn.Module):
    """Two layers with a function between them."""

    def __init__(self, function):
        super().__init__()
        self.a, self.b, self.function = nn.Linear(8, 16), nn.Linear(16, 5), function

    def forward(self, x):
        return self.b(self.function(self.a(x) * 4) / 4)


class Two(nn.Module):
    """A second head, which the loss does not read."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.value = nn.Linear(8, 16), nn.Linear(16, 5), nn.Linear(16, 3)

    def forward(self, x):
        h = torch.tanh(self.a(x))
        return self.b(h), self.value(h)


class Optimized(nn.Module):
    """Parameters that the exporter's optimization merges (of equal values), transposes or drops (zero biases)."""

    def __init__(self):
        super().__init__()
        self.up, self.a, self.b, self.down = nn.Linear(8, 8), nn.LayerNorm(8), nn.LayerNorm(8), nn.Linear(8, 5)
        self.conv, self.mix = nn.Conv1d(1, 3, 3, padding=1), nn.Linear(4, 4)
        for layer in (self.up, self.down, self.conv):
            nn.init.zeros_(layer.bias)

    def forward(self, x):
        x = x + torch.tanh(self.up(self.a(x)))
        x = x + self.conv(x[:, None]).mean(1) + self.mix(x.reshape(-1, 2, 4)).reshape(-1, 8)
        return self.down(self.b(x))


class Alike(nn.Module):
    """Buffers and a constant that begin like parameters of their shapes, and parameters without roles that begin alike."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("std", torch.ones(8))
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 5)
        self.first, self.second = nn.PReLU(8), nn.PReLU(8)
        self.low, self.high, self.scale = (nn.Parameter(torch.ones(8)) for _ in range(3))
        self.gain, self.gate = (nn.Parameter(torch.tensor(0.5)) for _ in range(2))

    def forward(self, x):
        x = self.first(self.norm((x - self.mean) / self.std)) * torch.ones(8)
        h = self.second(self.up(x) * self.gain) * torch.where(x > 0, self.low, self.high)
        return self.down(torch.addcmul(self.scale, h, self.high) * self.gate)


def without_paths(file):
    """Without the stack traces of the machine it was made on."""
    model = load(file)
    for node in model.graph.node:
        kept = [p for p in node.metadata_props if p.key != "pkg.torch.onnx.stack_trace"]
        del node.metadata_props[:]
        node.metadata_props.extend(kept)
        node.doc_string = ""
    save(model, file)


def export(file, net, x, outputs=("logits",), **options):
    if options.get("dynamo"):
        options |= dict(external_data=False, dynamic_shapes=({0: torch.export.Dim("batch")},))
    else:
        options |= dict(opset_version=17, dynamic_axes={name: {0: "batch"} for name in ("x", *outputs)})
    torch.onnx.export(net, (x,), file, input_names=["x"], output_names=list(outputs), **options)
    without_paths(file)


torch.manual_seed(0)
x = torch.randn(4, 8)
dynamo = dict(dynamo=True, optimize=False)
torchscript = dict(dynamo=False, do_constant_folding=False, training=torch.onnx.TrainingMode.PRESERVE)
export("round.onnx", Between(Round.apply).train(), x, **dynamo)
export("round_torchscript.onnx", Between(torch.round).train(), x, **torchscript)
export("detach.onnx", Between(torch.detach).train(), x, **dynamo)
export("integers.onnx", Between(lambda h: h.to(torch.int64).to(torch.float32)).train(), x, **dynamo)
export("head.onnx", Two().train(), x, outputs=("logits", "value"), **dynamo)

# In evaluation mode batch normalization is folded into the convolutions before it.
layers = [nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 5, 3), nn.BatchNorm2d(5), nn.Flatten(), nn.Linear(80, 5)]
image = torch.randn(4, 3, 8, 8)
net = nn.Sequential(*layers)
with torch.no_grad():
    net.train()(torch.randn(16, 3, 8, 8))
export("folded.onnx", net.eval(), image, dynamo=False)
export("folded_dynamo.onnx", net.eval(), image, dynamo=True, optimize=True)
export("optimized.onnx", Optimized().train(), x, dynamo=True, optimize=True)
export("alike.onnx", Alike().train(), x, dynamo=True, optimize=True)
