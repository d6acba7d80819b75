#!/usr/bin/env python3
"""A Llama whose attention gets low-rank adapters: the losses of PEFT, and an adapter that PEFT loads."""

import copy
import tempfile

import peft
import torch
import transformers
from reference import batches_of, compare_metrics, train

import frit

BATCH, STEPS, LENGTH = 8, 5, 32
torch.manual_seed(0)
config = transformers.LlamaConfig(
    vocab_size=260, hidden_size=64, intermediate_size=172, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64,
)  # fmt: skip
module = transformers.LlamaForCausalLM(config)
tokens = torch.randint(0, 260, (BATCH * STEPS, LENGTH + 1))
data = {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


def loss_of(module, batch):
    logits = module(batch["input_ids"]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


adapter = {"kind": "lora", "rank": 8, "alpha": 16, "targets": ["**.q_proj", "**.v_proj"]}
example = {"input_ids": data["input_ids"][:BATCH]}
plan = frit.compile(module, example, loss="cross_entropy", precision="fp32", adapter=adapter, optimizer={"lr": 1e-2})
print(plan)
with tempfile.TemporaryDirectory() as folder, plan.trainer() as trainer:
    # Before the first step, for PEFT to begin with the same matrices.
    trainer.save_adapter(f"{folder}/before")
    metrics = [trainer.step(batch) for batch in batches_of(data, BATCH)]
    trainer.save_adapter(f"{folder}/after")
    evaluated, state = trainer.evaluate(batches_of(data, BATCH)), trainer.state_dict()
    before = peft.PeftModel.from_pretrained(copy.deepcopy(module), f"{folder}/before", is_trainable=True)
    after = peft.PeftModel.from_pretrained(copy.deepcopy(module), f"{folder}/after")

losses, norms, expected = train(before, batches_of(data, BATCH), loss_of, lr=1e-2)
compare_metrics(metrics, losses, norms)
theirs = peft.get_peft_model_state_dict(expected)
for name, matrix in peft.get_peft_model_state_dict(after).items():
    assert torch.allclose(matrix, theirs[name], atol=1e-3), name
with torch.no_grad():
    found = [float(loss_of(after.eval(), batch)) for batch in batches_of(data, BATCH)]
assert abs(sum(found) / STEPS - evaluated["loss"]) < 1e-4
# The adapter's matrices are beside the state of the module, which is unchanged.
missing, unexpected = module.load_state_dict(state, strict=False)
assert not missing and all(".lora_" in name for name in unexpected)
