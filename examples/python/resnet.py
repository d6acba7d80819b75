#!/usr/bin/env python3
"""A ResNet with batch normalization, on one rank, and on two that normalize by the batch of both."""

import tempfile

import torch
import transformers
from reference import batches_of, compare_metrics, compare_modules, train

import frit

BATCH, STEPS = 8, 5
torch.manual_seed(0)
config = transformers.ResNetConfig(
    embedding_size=16, hidden_sizes=[16, 32], depths=[2, 2], layer_type="basic", num_labels=10, downsample_in_first_stage=False
)
module = transformers.ResNetForImageClassification(config)
data = {"pixel_values": torch.randn(BATCH * STEPS, 3, 32, 32), "labels": torch.randint(0, 10, (BATCH * STEPS,))}


def loss_of(module, batch):
    return torch.nn.functional.cross_entropy(module(batch["pixel_values"]).logits, batch["labels"])


losses, norms, expected = train(module, batches_of(data, BATCH), loss_of)
for ranks in (1, 2):
    sync = {"model": {"batch_norm": "sync"}} if ranks > 1 else {}
    example = {"pixel_values": data["pixel_values"][: BATCH // ranks]}
    plan = frit.compile(module, example, loss="cross_entropy", precision="fp32", ranks=ranks, **sync)
    with tempfile.TemporaryDirectory() as folder, plan.trainer() as trainer:
        metrics = [trainer.step(batch) for batch in batches_of(data, BATCH)]
        trainer.save(f"{folder}/model.safetensors")
        state, evaluated = trainer.state_dict(), trainer.evaluate(batches_of(data, BATCH))
    print(f"{ranks} ranks, accuracy {evaluated['metrics']['accuracy']:.2f}")
    compare_metrics(metrics, losses, norms, tolerance=1e-4)

module.load_state_dict(state)
compare_modules(module, expected)
with torch.no_grad():
    after = [float(loss_of(module.eval(), batch)) for batch in batches_of(data, BATCH)]
assert abs(sum(after) / STEPS - evaluated["loss"]) < 1e-3
