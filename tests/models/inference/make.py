#!/usr/bin/env python3
"""Write the models of tests/suite/inference.rs, exported in training mode: batch normalization, Dropout and random masks that
the exporters generate. The logits are those of PyTorch in evaluation mode. Run in this folder; needs torch, torchvision,
onnx, onnxscript and safetensors."""
import torch
from onnx import load, numpy_helper, save
from safetensors.torch import save_file
from torch import nn
from torchvision.ops import StochasticDepth


class Net(nn.Module):
    def __init__(self, further):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6)
        self.further, self.drop = further, nn.Dropout(0.3)
        self.fc, self.out = nn.Linear(6, 16), nn.Linear(16, 4)
        self.fc_norm = nn.BatchNorm1d(16)

    def forward(self, x):
        h = torch.relu(self.norm(self.conv(x)))
        h = self.further(h).mean((2, 3))
        return self.out(self.drop(torch.tanh(self.fc_norm(self.fc(h)))))


def without_paths(file):
    """Without the stack traces of the machine it was made on."""
    model = load(file)
    for node in model.graph.node:
        kept = [p for p in node.metadata_props if p.key != "pkg.torch.onnx.stack_trace"]
        del node.metadata_props[:]
        node.metadata_props.extend(kept)
        node.doc_string = ""
    save(model, file)


x = torch.randn(16, 3, 7, 7, generator=torch.Generator().manual_seed(0))
data = {"x": x, "labels": torch.arange(16) % 4}
for name, further, options in (
    ("model", StochasticDepth(0.2, "row"), dict(dynamo=False, opset_version=17, training=torch.onnx.TrainingMode.PRESERVE,
                                                do_constant_folding=False, dynamic_axes={"x": {0: "batch"}, "logits": {0: "batch"}})),
    ("model_dynamo", nn.Dropout2d(0.25), dict(dynamo=True, optimize=False, external_data=False,
                                              dynamic_shapes=({0: torch.export.Dim("batch")},))),
):
    torch.manual_seed(1)
    net = Net(further).train()
    with torch.no_grad():
        for _ in range(4):
            net(torch.randn(32, 3, 7, 7) * 2 + 0.5)
    torch.onnx.export(net.train(), (x,), name + ".onnx", input_names=["x"], output_names=["logits"], **options)
    without_paths(name + ".onnx")
    # The exporter ran the module in training mode, which renewed its statistics.
    stored = {t.name: torch.from_numpy(numpy_helper.to_array(t).copy()) for t in load(name + ".onnx").graph.initializer}
    net.load_state_dict({k: stored.get(k, v) for k, v in net.state_dict().items()})
    with torch.no_grad():
        data[name] = net.eval()(x)
save_file(data, "data.safetensors")
