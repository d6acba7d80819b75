#!/usr/bin/env python3
"""Write model.onnx, a language model whose output layer is its embedding table, exported with constant folding, which
stores the table a second time, transposed; data.safetensors; and reference.json, PyTorch's losses of 20 AdamW steps in
fp64. Run in this folder; needs torch, onnx, safetensors."""
import json

import torch
from safetensors.torch import save_file
from torch import nn

STEPS, BATCH, SEQ, VOCAB = 20, 4, 6, 29


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.layer = nn.Embedding(VOCAB, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, VOCAB, bias=False)
        self.head.weight = self.table.weight

    def forward(self, input_ids):
        x = self.table(input_ids)
        return self.head(x + torch.tanh(self.layer(x)))


torch.manual_seed(0)
net = Tied()
tokens = torch.randint(0, VOCAB, (STEPS * BATCH, SEQ + 1))
inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
torch.onnx.export(net, (inputs[:BATCH],), "model.onnx", dynamo=False, opset_version=17, do_constant_folding=True,
                  input_names=["input_ids"], output_names=["logits"], dynamic_axes={"input_ids": {0: "batch"}})
save_file({"input_ids": inputs, "labels": labels}, "data.safetensors")
net.double()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.01)
losses = []
for at in range(0, STEPS * BATCH, BATCH):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(net(inputs[at : at + BATCH]).flatten(0, 1), labels[at : at + BATCH].flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    losses.append(float(loss.detach()))
open("reference.json", "w").write(json.dumps({"fp64": {"loss": losses}}, indent=1))
