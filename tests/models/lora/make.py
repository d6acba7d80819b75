"""Reference values of adapters: PEFT's own losses, beside the model `../llama` and beside `../gpt2`, whose weights are `[in, out]`.

    pip install torch transformers peft safetensors onnx
    python3 tests/models/lora/make.py

Writes, for each model, the adapter as PEFT saves it before the first step (`llama/adapter_model.safetensors`,
`llama/adapter_config.json`) and `reference.json` with the losses of 20 steps of AdamW in f32.
"""

import json
import pathlib

import onnx
import torch
import transformers as hf
from onnx import numpy_helper
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file

HERE = pathlib.Path(__file__).parent
STEPS, BATCH = 20, 8
MODELS = {
    "llama": (
        hf.LlamaForCausalLM,
        hf.LlamaConfig(vocab_size=260, hidden_size=64, intermediate_size=172, num_hidden_layers=2, num_attention_heads=4,
                       num_key_value_heads=2, max_position_embeddings=64, use_cache=False),
        dict(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"]),
    ),
    "gpt2": (
        hf.GPT2LMHeadModel,
        hf.GPT2Config(vocab_size=257, n_positions=64, n_embd=64, n_layer=2, n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
                      use_cache=False),
        dict(r=3, lora_alpha=5, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True),
    ),
}


class Logits(torch.nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, ids):
        return self.net(input_ids=ids).logits


def make(name):
    kind, config, adapter = MODELS[name]
    folder = HERE.parent / name
    wrapped = Logits(kind(config))
    stored = onnx.load(folder / "model.onnx").graph.initializer
    state = {t.name: torch.from_numpy(numpy_helper.to_array(t).copy()) for t in stored}
    own = {key: value for key, value in state.items() if key in wrapped.state_dict()}
    missing, _ = wrapped.load_state_dict(own, strict=False)
    assert not [key for key in missing if not key.endswith(("lm_head.weight", "wte.weight"))], missing
    torch.manual_seed(1)
    model = get_peft_model(wrapped, LoraConfig(**adapter))
    model.save_pretrained(HERE / name)
    (HERE / name / "README.md").unlink(missing_ok=True)
    data = load_file(folder / "data.safetensors")
    ids, labels = data["input_ids"], data["labels"]
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.01)
    losses = []
    for step in range(STEPS):
        part = slice(step * BATCH, (step + 1) * BATCH)
        logits = model(ids[part])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[part].flatten().long())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


(HERE / "reference.json").write_text(json.dumps({name: make(name) for name in MODELS}, indent=1) + "\n")
