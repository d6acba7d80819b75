#!/usr/bin/env python3
"""Write the model of tests/suite/dropout.rs: two layers with Dropout between them, exported in training mode. Run in this
folder; needs torch, onnx, onnxscript and safetensors."""
import torch
from safetensors.torch import save_file
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Dropout(0.25), nn.Linear(32, 4)).train()
x = torch.randn(8, 8)
# Every example eight times, so that all ranks and steps see the same.
save_file({"x": x.repeat(8, 1), "labels": torch.arange(8).repeat(8) % 4}, "data.safetensors")
torch.onnx.export(net, (x,), "model.onnx", dynamo=False, opset_version=17, training=torch.onnx.TrainingMode.PRESERVE, do_constant_folding=False,
                  input_names=["x"], output_names=["logits"], dynamic_axes={"x": {0: "batch"}})
torch.onnx.export(net, (x,), "model_dynamo.onnx", dynamo=True, optimize=False, external_data=False, input_names=["x"], output_names=["logits"],
                  dynamic_shapes=({0: torch.export.Dim("batch")},))
