#!/usr/bin/env python3
"""Whisper of transformers: spectrograms in, text out, with labels that the module shifts and of which padding does not count."""

import tempfile

import torch
import transformers
from reference import batches_of, compare_metrics, compare_modules, train

import frit

BATCH, STEPS, FRAMES, LENGTH = 4, 5, 32, 10
torch.manual_seed(0)
config = transformers.WhisperConfig(
    vocab_size=151, num_mel_bins=8, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
    decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_source_positions=FRAMES // 2,
    max_target_positions=LENGTH, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    suppress_tokens=None, begin_suppress_tokens=None,
)  # fmt: skip
module = transformers.WhisperForConditionalGeneration(config)

count = BATCH * STEPS
padded = torch.arange(LENGTH) >= torch.randint(4, LENGTH + 1, (count, 1))
data = {
    "input_features": torch.randn(count, 8, FRAMES),
    "labels": torch.randint(3, 151, (count, LENGTH)).masked_fill(padded, -100),
}


def loss_of(module, batch):
    return module(**batch).loss


losses, norms, expected = train(module, batches_of(data, BATCH), loss_of)

plan = frit.compile(module, next(batches_of(data, BATCH)), loss="output", precision="fp32")
print(plan)
with tempfile.TemporaryDirectory() as folder, plan.trainer() as trainer:
    metrics = [trainer.step(batch) for batch in batches_of(data, BATCH)]
    trainer.save(f"{folder}/model.safetensors")
    state = trainer.state_dict()
compare_metrics(metrics, losses, norms)

module.load_state_dict(state)
compare_modules(module, expected)
