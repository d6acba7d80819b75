#!/usr/bin/env python3
"""Write the model of tests/suite/random.rs: a variational autoencoder whose output is its loss, by both exporters, and
PyTorch's results with Frit's random numbers. Run in this folder; needs torch, onnx, onnxscript and safetensors."""
import sys

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

sys.path.append("..")
import draws


class Vae(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8))
        self.decode = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 16))

    def forward(self, x):
        mean, log_variance = self.encode(x).chunk(2, -1)
        z = mean + torch.exp(0.5 * log_variance) * torch.randn_like(mean)
        reconstruction = functional.mse_loss(self.decode(z), x, reduction="none").sum(-1)
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(-1)
        return (reconstruction + 0.1 * divergence).mean()


torch.manual_seed(0)
net = Vae().train()
# Two-dimensional data in 16 dimensions, which a code of 4 can hold.
x = torch.tanh(torch.randn(64, 2) @ torch.randn(2, 16))
save_file({"x": x}, "data.safetensors")
torch.onnx.export(net, (x[:8],), "model_torchscript.onnx", dynamo=False, opset_version=17, training=torch.onnx.TrainingMode.PRESERVE,
                  do_constant_folding=False, input_names=["x"], output_names=["loss"], dynamic_axes={"x": {0: "batch"}})
torch.onnx.export(net, (x[:8],), "model.onnx", dynamo=True, optimize=False, external_data=False, input_names=["x"],
                  output_names=["loss"], dynamic_shapes=({0: torch.export.Dim("batch")},))
draws.without_traces("model.onnx")


def draw(position):
    torch.randn_like = lambda like: torch.from_numpy(draws.normal(like.shape, position, 0))


draws.write_reference(net, x, draw)
