#!/usr/bin/env python3
"""Write model.onnx, a bidirectional LSTM with zero biases and a GRU of two layers without biases, exported with the dynamo exporter's default optimization,
which packs their weights as ONNX has them; data.safetensors; and reference.json, PyTorch's losses of 20 AdamW steps in fp64. Run in this
folder; needs torch, onnx, onnxscript, safetensors."""
import json

import torch
from onnx import load, save
from safetensors.torch import save_file
from torch import nn

STEPS, BATCH, SEQ, WIDTH, VOCAB = 20, 4, 5, 6, 13


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(VOCAB, WIDTH)
        self.both = nn.LSTM(WIDTH, 4, batch_first=True, bidirectional=True)
        self.deep = nn.GRU(8, 5, num_layers=2, bias=False, batch_first=True)
        self.head = nn.Linear(5, VOCAB)
        for name, bias in self.both.named_parameters():
            if "bias" in name:
                nn.init.zeros_(bias)

    def forward(self, input_ids):
        x, _ = self.both(self.table(input_ids))
        return self.head(self.deep(x)[0])


torch.manual_seed(0)
net = Recurrent()
tokens = torch.randint(0, VOCAB, (STEPS * BATCH, SEQ + 1))
inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
torch.onnx.export(net, (inputs[:BATCH],), "model.onnx", dynamo=True, external_data=False, input_names=["input_ids"],
                  output_names=["logits"])
model = load("model.onnx")
for node in model.graph.node:
    # Without the stack traces of the machine it was made on.
    kept = [p for p in node.metadata_props if p.key in ("pkg.torch.onnx.fx_node", "pkg.torch.onnx.name_scopes")]
    del node.metadata_props[:]
    node.metadata_props.extend(kept)
del model.graph.value_info[:]
save(model, "model.onnx")
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
