#!/usr/bin/env python3
"""Write model.onnx, a graph network whose inputs differ in their first axes: nodes and edges; data.safetensors with 24 graphs of one
size; and reference.json, PyTorch's losses of 12 AdamW steps in fp64, of two graphs each. Run in this folder; needs torch, onnx, onnxscript,
safetensors."""
import json
import sys

import torch
from safetensors.torch import save_file
from torch import nn

sys.path.append("..")
import draws

GRAPHS, NODES, EDGES, CLASSES = 24, 9, 14, 3


class Layer(nn.Module):
    """The mean over the neighbours of each node, beside the node itself."""

    def __init__(self, width, out):
        super().__init__()
        self.own, self.neighbours = nn.Linear(width, out), nn.Linear(width, out, bias=False)

    def forward(self, x, source, target):
        sums = torch.zeros_like(x).index_add(0, target, x[source])
        degree = torch.zeros_like(x[:, :1]).index_add(0, target, torch.ones_like(x[source, :1]))
        return self.own(x) + self.neighbours(sums / degree.clamp(min=1))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Layer(4, 8), Layer(8, CLASSES)

    def forward(self, x, edges):
        source, target = edges[0], edges[1]
        return self.second(torch.relu(self.first(x, source, target)), source, target)


torch.manual_seed(0)
net = Net()
x = torch.randn(GRAPHS, NODES, 4)
edges = torch.randint(0, NODES, (GRAPHS, 2, EDGES))
labels = torch.randint(0, CLASSES, (GRAPHS, NODES))
torch.onnx.export(net, (x[0], edges[0]), "model.onnx", dynamo=True, optimize=False, external_data=False, input_names=["x", "edges"],
                  output_names=["logits"])
draws.without_traces("model.onnx")
save_file({"x": x, "edges": edges, "labels": labels}, "data.safetensors")
net.double()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.01)
losses = []
for at in range(0, GRAPHS, 2):
    optimizer.zero_grad()
    logits = torch.stack([net(x[i].double(), edges[i]) for i in (at, at + 1)])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels[at : at + 2].flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    losses.append(float(loss.detach()))
open("reference.json", "w").write(json.dumps({"fp64": {"loss": losses}}, indent=1))
