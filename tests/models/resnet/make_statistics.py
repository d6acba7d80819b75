#!/usr/bin/env python3
"""Write statistics.safetensors: the running statistics of the resnet in PyTorch (fp64) after three steps with batches of 8
(`whole.`), with two accumulated micro-batches of 4 (`accumulated.`), and averaged over two ranks, each of which has half
of the batch (`by_rank.`); for tests/suite/vision.rs.

    python make_statistics.py MODULES.py

MODULES.py has `build("resnet", generator)`, which gives the module first. Run in this folder; needs torch, safetensors."""
import importlib.util
import sys

import onnx
import torch
from onnx.numpy_helper import to_array
from safetensors.torch import load_file, save_file

STEPS, BATCH = 3, 8
MICRO_BATCHES = {"whole": [range(8)], "accumulated": [range(4), range(4, 8)], "by_rank": [[0, 1, 4, 5], [2, 3, 6, 7]]}


def train(net, data, micro_batches):
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro_batch in micro_batches:
            at = [step * BATCH + i for i in micro_batch]
            loss = torch.nn.functional.cross_entropy(net(data["x"][at].double()), data["labels"][at])
            (loss / len(micro_batches)).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
    return {k: v.float() for k, v in net.state_dict().items() if "running_" in k}


spec = importlib.util.spec_from_file_location("modules", sys.argv[1])
modules = importlib.util.module_from_spec(spec)
spec.loader.exec_module(modules)
initializers = {i.name: torch.from_numpy(to_array(i).copy()) for i in onnx.load("model.onnx").graph.initializer}
data, result = load_file("data.safetensors"), {}
for name, micro_batches in MICRO_BATCHES.items():
    net = modules.build("resnet", torch.Generator().manual_seed(1))[0].train()
    net.load_state_dict({k: v for k, v in initializers.items() if k in net.state_dict()})
    found = train(net.double(), data, micro_batches)
    result |= {f"{name}.{k}": v for k, v in found.items()}
save_file(result, "statistics.safetensors")
