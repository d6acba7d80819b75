#!/usr/bin/env python3
"""T5 of transformers with padded texts and summaries. The module computes its loss, in which padding does not count."""

import tempfile

import torch
import transformers
from reference import batches_of, compare_metrics, compare_modules, train

import frit

BATCH, STEPS, SOURCE, TARGET = 8, 5, 24, 12
torch.manual_seed(0)
config = transformers.T5Config(
    vocab_size=211, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, dropout_rate=0.0, decoder_start_token_id=0
)
module = transformers.T5ForConditionalGeneration(config)

count = BATCH * STEPS
lengths = torch.randint(SOURCE // 2, SOURCE + 1, (count, 1))
mask = (torch.arange(SOURCE) < lengths).long()
target = torch.randint(2, 211, (count, TARGET))
padded = torch.arange(TARGET) >= torch.randint(3, TARGET + 1, (count, 1))
data = {
    "input_ids": torch.randint(2, 211, (count, SOURCE)) * mask,
    "attention_mask": mask,
    "labels": target.masked_fill(padded, -100),
}


def loss_of(module, batch):
    return module(**batch).loss


losses, norms, expected = train(module, batches_of(data, BATCH), loss_of)

example = next(batches_of(data, BATCH))
plan = frit.compile(module, example, loss="output", precision="fp32")
print(plan)
with tempfile.TemporaryDirectory() as folder, plan.trainer() as trainer:
    metrics = [trainer.step(batch) for batch in batches_of(data, BATCH)]
    trainer.save(f"{folder}/model.safetensors")
    state = trainer.state_dict()
compare_metrics(metrics, losses, norms)

module.load_state_dict(state)
compare_modules(module, expected)
print(module.generate(data["input_ids"][:1], attention_mask=mask[:1], max_new_tokens=4))
