#!/usr/bin/env python3
"""GPT-2 of transformers, with its table tied to its head, from a DataLoader, in f32 and in bf16 on two ranks."""

import tempfile

import torch
import transformers
from reference import compare_metrics, compare_modules, train

import frit

BATCH, STEPS, LENGTH = 8, 5, 32
torch.manual_seed(0)
config = transformers.GPT2Config(
    vocab_size=257, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
    bos_token_id=256, eos_token_id=256,
)  # fmt: skip
module = transformers.GPT2LMHeadModel(config)

tokens = torch.randint(0, 257, (BATCH * STEPS, LENGTH + 1))
examples = [{"input_ids": t[:-1], "labels": t[1:]} for t in tokens]
loader = torch.utils.data.DataLoader(examples, batch_size=BATCH)


def loss_of(module, batch):
    logits = module(batch["input_ids"]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


losses, norms, expected = train(module, loader, loss_of)

plan = frit.compile(module, {"input_ids": tokens[:BATCH, :-1]}, loss="cross_entropy", precision="fp32")
print(plan)
with tempfile.TemporaryDirectory() as folder, plan.trainer(checkpoint=f"{folder}/checkpoints") as trainer:
    metrics = [trainer.step(batch) for batch in loader]
    trainer.save(f"{folder}/model.safetensors")
    state, evaluated = trainer.state_dict(), trainer.evaluate(loader)
compare_metrics(metrics, losses, norms)

module.load_state_dict(state)
compare_modules(module, expected)
with torch.no_grad():
    after = [float(loss_of(module.eval(), batch)) for batch in loader]
assert abs(sum(after) / STEPS - evaluated["loss"]) < 1e-4
assert module.lm_head.weight is module.transformer.wte.weight

# Two ranks, each with half of a batch, in bf16.
halves = {"input_ids": tokens[: BATCH // 2, :-1]}
plan = frit.compile(module, halves, loss="cross_entropy", precision="bf16", ranks=2)
with plan.trainer() as trainer:
    first = trainer.step(next(iter(loader)))["loss"]
print(f"bf16 on two ranks: {first:.4f}   f32 {after[0]:.4f}")
assert abs(first - after[0]) < 2e-2 * after[0]
