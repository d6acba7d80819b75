#!/usr/bin/env python3
"""Prints the losses of three steps of tests/museum/models/lm.json in PyTorch: right, and as the errors of the museum compute them.

    frit compile tests/museum/models/lm.json --bind batch=12 --set precision.compute=fp32 -o plan
    python3 tests/museum/reference.py plan/weights.safetensors
"""
import sys

import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy, gelu, layer_norm

VOCABULARY, TOKENS, EXAMPLES, STEP = 11, 6, 24, 12


def label(row, column):
    ignored = (row * 5 + column * 3) % 7 < row % 4
    return -100 if ignored else (row * 5 + column * 2 + 1) % VOCABULARY


IDS = torch.tensor([[(r * 7 + c * 3 + r * c) % VOCABULARY for c in range(TOKENS)] for r in range(EXAMPLES)])
LABELS = torch.tensor([[label(r, c) for c in range(TOKENS)] for r in range(EXAMPLES)])


def losses(params, ids, labels):
    h = params["wte"][ids]
    for i in range(2):
        h = h + gelu(h @ params[f"h.{i}.fc.weight"]) @ params[f"h.{i}.proj.weight"]
    h = layer_norm(h, (8,), params["norm.weight"], params["norm.bias"], 1e-5) * params["gain"]
    return cross_entropy((h @ params["wte"].T).flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100)


def train(file, loss, zero_grad=True):
    params = {name: t.double().requires_grad_() for name, t in load_file(file).items()}
    optimizer, reported = torch.optim.SGD(params.values(), lr=0.5), []
    for step in range(3):
        at = step * STEP % EXAMPLES
        value = loss(params, IDS[at : at + STEP], LABELS[at : at + STEP])
        if zero_grad:
            optimizer.zero_grad()
        value.backward()
        optimizer.step()
        reported.append(round(value.item(), 9))
    return reported


def by_token(params, ids, labels):
    return losses(params, ids, labels) / (labels != -100).sum()


def by_micro_batch(params, ids, labels, size=2):
    parts = [slice(i, i + size) for i in range(0, STEP, size)]
    return sum(by_token(params, ids[p], labels[p]) for p in parts) / len(parts)


def summed(params, ids, labels):
    return 6 * by_token(params, ids, labels)


def all_positions(params, ids, labels):
    return losses(params, ids, labels) / labels.numel()


if __name__ == "__main__":
    file = sys.argv[1]
    print("right                  ", train(file, by_token))
    print("mean of micro-batches  ", train(file, by_micro_batch))
    print("sum of micro-batches   ", train(file, summed))
    print("padding counted        ", train(file, all_positions))
    print("no zero_grad           ", train(file, by_token, zero_grad=False))
