#!/usr/bin/env python3
"""BERT with padded sentences: a mask for the attention, and labels of which most do not count."""

import tempfile

import torch
import transformers
from reference import batches_of, compare_metrics, compare_modules, train

import frit

BATCH, STEPS, LENGTH = 8, 5, 24
torch.manual_seed(0)
config = transformers.BertConfig(
    vocab_size=199, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
    max_position_embeddings=LENGTH, hidden_dropout_prob=0, attention_probs_dropout_prob=0,
)  # fmt: skip
module = transformers.BertForMaskedLM(config)

count = BATCH * STEPS
mask = (torch.arange(LENGTH) < torch.randint(LENGTH // 2, LENGTH + 1, (count, 1))).long()
tokens = torch.randint(5, 199, (count, LENGTH)) * mask
hidden = (torch.rand(count, LENGTH) < 0.15) & mask.bool()
hidden[:, 0] = True
data = {
    "input_ids": tokens.masked_fill(hidden, 4),
    "attention_mask": mask,
    "labels": tokens.masked_fill(~hidden, -100),
}


def loss_of(module, batch):
    logits = module(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


losses, norms, expected = train(module, batches_of(data, BATCH), loss_of)

example = next(batches_of(data, BATCH))
del example["labels"]
plan = frit.compile(module, example, loss="cross_entropy", precision="fp32")
print(plan)
with tempfile.TemporaryDirectory() as folder, plan.trainer() as trainer:
    metrics = [trainer.step(batch) for batch in batches_of(data, BATCH)]
    trainer.save(f"{folder}/model.safetensors")
    state = trainer.state_dict()
compare_metrics(metrics, losses, norms)

module.load_state_dict(state)
compare_modules(module, expected)
