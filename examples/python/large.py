#!/usr/bin/env python3
"""A model above 2 GiB, the limit of one ONNX file: a table of tokens and a head of its own, trained by SGD."""

import tempfile

import torch
from reference import batches_of, compare_metrics, compare_modules, train
from torch import nn

import frit

BATCH, STEPS, LENGTH = 2, 2, 8
VOCABULARY, WIDTH = 290_000, 1024


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        return self.head(self.norm(self.table(tokens)))


torch.manual_seed(0)
module = Model()
size = sum(p.numel() * p.element_size() for p in module.parameters())
print(f"{size / 2**30:.2f} GiB of parameters")
assert size > 2**31
data = {name: torch.randint(0, VOCABULARY, (BATCH * STEPS, LENGTH)) for name in ("tokens", "labels")}


def loss_of(module, batch):
    return nn.functional.cross_entropy(module(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())


sgd = {"kind": "sgd", "lr": 0.1, "weight_decay": 0.0}
example = {"tokens": data["tokens"][:BATCH]}
plan = frit.compile(module, example, loss="cross_entropy", precision="fp32", optimizer=sgd)
print(plan)
with tempfile.TemporaryDirectory() as folder, plan.trainer(evaluation=False) as trainer:
    metrics = [trainer.step(batch) for batch in batches_of(data, BATCH)]
    trainer.save(f"{folder}/model.safetensors")
    state = trainer.state_dict()
del plan

losses, norms, expected = train(module, batches_of(data, BATCH), loss_of, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
compare_metrics(metrics, losses, norms)
module.load_state_dict(state)
compare_modules(module, expected)
