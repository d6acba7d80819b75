#!/usr/bin/env python3
"""CLIP of transformers: images and texts, and a contrastive loss over the batch that the module computes."""

import tempfile

import torch
import transformers
from reference import batches_of, compare_metrics, compare_modules, train

import frit

BATCH, STEPS, LENGTH = 8, 5, 16
torch.manual_seed(0)
common = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
config = transformers.CLIPConfig(
    text_config={**common, "vocab_size": 99, "max_position_embeddings": LENGTH, "bos_token_id": 97, "eos_token_id": 98},
    vision_config={**common, "image_size": 32, "patch_size": 8},
    projection_dim=24,
)
module = transformers.CLIPModel(config)

count = BATCH * STEPS
lengths = torch.randint(4, LENGTH + 1, (count, 1))
positions = torch.arange(LENGTH)
tokens = torch.randint(1, 97, (count, LENGTH)).masked_fill(positions >= lengths - 1, 98)
data = {
    "input_ids": tokens,
    "attention_mask": (positions < lengths).long(),
    "pixel_values": torch.randn(count, 3, 32, 32),
}


def loss_of(module, batch):
    return module(**batch, return_loss=True).loss


losses, norms, expected = train(module, batches_of(data, BATCH), loss_of)

example = {**next(batches_of(data, BATCH)), "return_loss": True}
plan = frit.compile(module, example, loss="output", precision="fp32")
print(plan)
with tempfile.TemporaryDirectory() as folder, plan.trainer() as trainer:
    metrics = [trainer.step(batch) for batch in batches_of(data, BATCH)]
    trainer.save(f"{folder}/model.safetensors")
    state = trainer.state_dict()
compare_metrics(metrics, losses, norms)

module.load_state_dict(state)
compare_modules(module, expected)
