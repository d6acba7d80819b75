#!/usr/bin/env python3
"""Write the model of tests/suite/random.rs: a step of denoising diffusion (Ho et al. 2020) whose output is its loss, by both
exporters: a random time per example, noise, and the error of the predicted noise; and PyTorch's results with
Frit's random numbers. Run in this folder; needs torch, onnx, onnxscript and safetensors."""
import sys

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

sys.path.append("..")
import draws

TIMES = 50


class Diffusion(nn.Module):
    def __init__(self):
        super().__init__()
        self.times = nn.Embedding(TIMES, 16)
        self.down = nn.Linear(16, 32)
        self.inner = nn.Linear(32, 32)
        self.up = nn.Linear(64, 16)
        beta = torch.linspace(1e-3, 0.2, TIMES)
        self.register_buffer("kept", torch.cumprod(1 - beta, 0))

    def forward(self, x):
        t = torch.randint(0, TIMES, (x.shape[0],))
        noise = torch.randn_like(x)
        kept = self.kept[t][:, None]
        noisy = kept.sqrt() * x + (1 - kept).sqrt() * noise
        h = functional.silu(self.down(noisy + self.times(t)))
        found = self.up(torch.cat([functional.silu(self.inner(h)), h], -1))
        return functional.mse_loss(found, noise)


torch.manual_seed(0)
net = Diffusion().train()
x = torch.tanh(torch.randn(64, 2) @ torch.randn(2, 16))
save_file({"x": x}, "data.safetensors")
torch.onnx.export(net, (x[:8],), "model_torchscript.onnx", dynamo=False, opset_version=17, training=torch.onnx.TrainingMode.PRESERVE,
                  do_constant_folding=False, input_names=["x"], output_names=["loss"], dynamic_axes={"x": {0: "batch"}})
torch.onnx.export(net, (x[:8],), "model.onnx", dynamo=True, optimize=False, external_data=False, input_names=["x"],
                  output_names=["loss"], dynamic_shapes=({0: torch.export.Dim("batch")},))
draws.without_traces("model.onnx")


def draw(position):
    times = lambda low, high, size: torch.from_numpy(draws.uniform(tuple(size), position, 0) * high).long()
    torch.randint = times
    torch.randn_like = lambda like: torch.from_numpy(draws.normal(like.shape, position, 1))


draws.write_reference(net, x, draw)
