#!/usr/bin/env python3
"""Writes the parameters of a GPT-2 model of make_models.py, as `frit-run --save` wrote them, as a checkpoint of llm.c in
bf16, so that both train from the same weights. Usage: llmc.py MODEL SAVED.safetensors OUT.bin
"""

import sys

import make_models
import torch
from safetensors import safe_open

# In llm.c's order: the tensors of all layers, one after the other; matrices are [out, in] there.
LAYERS = ["ln_1.weight", "ln_1.bias", "attn.c_attn.weight", "attn.c_attn.bias", "attn.c_proj.weight", "attn.c_proj.bias",
          "ln_2.weight", "ln_2.bias", "mlp.c_fc.weight", "mlp.c_fc.bias", "mlp.c_proj.weight", "mlp.c_proj.bias"]
MAGIC, BF16_VERSION = 20240326, 5


def write(model, saved, out):
    sizes = {**make_models.MODELS, **make_models.TINY}[model]
    padded = -(-sizes["vocab"] // 128) * 128
    header = torch.zeros(256, dtype=torch.int32)
    header[:8] = torch.tensor([MAGIC, BF16_VERSION, sizes["seq"], sizes["vocab"], sizes["layers"], sizes["heads"],
                               sizes["width"], padded])
    with safe_open(saved, "pt") as tensors, open(out, "wb") as file:

        def put(name):
            x = tensors.get_tensor(f"transformer.{name}")
            if name == "wte.weight":
                x = torch.nn.functional.pad(x, (0, 0, 0, padded - sizes["vocab"]))
            elif name.startswith("h.") and x.dim() == 2:
                x = x.t()
            file.write(x.to(torch.bfloat16).contiguous().view(torch.int16).numpy().tobytes())

        file.write(header.numpy().tobytes())
        for name in ("wte.weight", "wpe.weight"):
            put(name)
        for name in LAYERS:
            for layer in range(sizes["layers"]):
                put(f"h.{layer}.{name}")
        for name in ("ln_f.weight", "ln_f.bias"):
            put(name)


if __name__ == "__main__":
    write(*sys.argv[1:])
