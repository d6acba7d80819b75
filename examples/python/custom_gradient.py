#!/usr/bin/env python3
"""Custom gradients: torch.autograd.Function trains in Frit as it does in PyTorch. A quantized layer with a straight-through gradient,
and a domain classifier behind a reversed one (Ganin and Lempitsky 2015)."""

import torch
from torch import nn

import frit

BATCH, STEPS = 16, 20


class Quantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, levels):
        return torch.round(x * levels) / levels

    @staticmethod
    def backward(ctx, dy):
        return dy, None


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        return -ctx.factor * dy, None


class Adversarial(nn.Module):
    """Classes from features that tell nothing of the domain; both losses are summed."""

    def __init__(self):
        super().__init__()
        self.features = nn.Linear(8, 32)
        self.classes, self.domains = nn.Linear(32, 4), nn.Linear(32, 2)

    def forward(self, x, labels, domain):
        h = torch.tanh(Quantize.apply(self.features(x), 16.0))
        loss = nn.functional.cross_entropy(self.classes(h), labels)
        return loss + nn.functional.cross_entropy(self.domains(Reverse.apply(h, 0.3)), domain)


torch.manual_seed(0)
net = Adversarial()
count = BATCH * STEPS
data = [torch.randn(count, 8), torch.randint(0, 4, (count,)), torch.randint(0, 2, (count,))]
batches = [dict(zip(("x", "labels", "domain"), batch)) for batch in zip(*(t.split(BATCH) for t in data))]

plan = frit.compile(net, batches[0], loss="output", precision="fp32", optimizer={"lr": 1e-2})
print(plan)
with plan.trainer() as trainer:
    losses = [trainer.step(batch)["loss"] for batch in batches]

optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.01)
for batch, loss in zip(batches, losses):
    expected = net(**batch)
    optimizer.zero_grad()
    expected.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    assert abs(loss - expected.item()) < 1e-4, (loss, expected.item())
print(f"{STEPS} losses are PyTorch's: {losses[0]:.4f} -> {losses[-1]:.4f}")
