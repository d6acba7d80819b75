#!/usr/bin/env python3
"""A variational autoencoder that computes its loss: with noise as an input, and with noise of its own."""

import tempfile

import torch
from reference import batches_of, compare_metrics, compare_modules, train
from torch import nn
from torch.nn import functional as F

import frit

BATCH, STEPS, LATENT = 8, 5, 6


class Vae(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.SiLU(), nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.SiLU(), nn.Flatten(),
        )  # fmt: skip
        self.mean, self.log_variance = nn.Linear(16 * 49, LATENT), nn.Linear(16 * 49, LATENT)
        self.decoder = nn.Sequential(
            nn.Linear(LATENT, 16 * 49), nn.Unflatten(1, (16, 7, 7)), nn.SiLU(),
            nn.ConvTranspose2d(16, 8, 4, stride=2, padding=1), nn.SiLU(), nn.ConvTranspose2d(8, 1, 4, stride=2, padding=1),
        )  # fmt: skip

    def forward(self, x, noise=None):
        h = self.encoder(x)
        mean, log_variance = self.mean(h), self.log_variance(h)
        if noise is None:
            noise = torch.randn_like(mean)
        logits = self.decoder(mean + torch.exp(log_variance / 2) * noise)
        reconstruction = F.binary_cross_entropy_with_logits(logits, x, reduction="none").sum((1, 2, 3)).mean()
        divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(1).mean()
        return {"loss": reconstruction + divergence, "reconstruction": reconstruction, "divergence": divergence}


torch.manual_seed(0)
module = Vae()
data = {"x": torch.rand(BATCH * STEPS, 1, 28, 28), "noise": torch.randn(BATCH * STEPS, LATENT)}
losses, norms, expected = train(module, batches_of(data, BATCH), lambda module, batch: module(**batch)["loss"])

plan = frit.compile(module, next(batches_of(data, BATCH)), loss="output", precision="fp32")
with tempfile.TemporaryDirectory() as folder, plan.trainer() as trainer:
    metrics = [trainer.step(batch) for batch in batches_of(data, BATCH)]
    trainer.save(f"{folder}/model.safetensors")
    state = trainer.state_dict()
compare_metrics(metrics, losses, norms)

# The noise of the module itself is drawn anew in every step.
plan = frit.compile(module, data["x"][:BATCH], loss="output", precision="fp32", optimizer={"lr": 3e-3})
batch = {"x": data["x"][:BATCH]}
with plan.trainer() as trainer:
    found = [trainer.step(batch)["loss"] for _ in range(30)]
print(f"with its own noise: {found[0]:.2f} → {found[-1]:.2f}")
assert found[-1] < found[0]

module.load_state_dict(state)
compare_modules(module, expected)
