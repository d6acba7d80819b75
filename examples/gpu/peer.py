#!/usr/bin/env python3
"""Trains one of make_models.py's models with PyTorch and writes what it took: the other side of check.sh's table.

Autocast in bf16 or plain f32, fused AdamW, clip_grad_norm, scaled_dot_product_attention; in eager mode or compiled.
The model is the same as the JSON one, parameter by parameter, so that --weights can read what `frit-run --save`
wrote. Usage: peer.py --model NAME --data FILE --batch N --steps N --json OUT [--mode compile] [...]
"""

import argparse
import contextlib
import json
import math
import statistics
import time

import make_models
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn


class Linear(nn.Linear):
    """Named as nn.Linear, but first values and saved weights are [in, out], as in the JSON models."""

    def _load_from_state_dict(self, state, prefix, *rest):
        state[f"{prefix}weight"] = state[f"{prefix}weight"].t()
        super()._load_from_state_dict(state, prefix, *rest)


def split_heads(x, heads):
    return x.view(*x.shape[:2], heads, -1).transpose(1, 2)


def attend(q, k, v, causal):
    y = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    return y.transpose(1, 2).flatten(2)


class Gpt2Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = nn.ModuleDict({"c_attn": Linear(width, 3 * width), "c_proj": Linear(width, width)})
        self.mlp = nn.ModuleDict({"c_fc": Linear(width, 4 * width), "c_proj": Linear(4 * width, width)})

    def forward(self, h):
        q, k, v = (split_heads(x, self.heads) for x in self.attn["c_attn"](self.ln_1(h)).chunk(3, dim=2))
        h = h + self.attn["c_proj"](attend(q, k, v, True))
        return h + self.mlp["c_proj"](F.gelu(self.mlp["c_fc"](self.ln_2(h)), approximate="tanh"))


class Gpt2(nn.Module):
    def __init__(self, layers, width, heads, seq, vocab):
        super().__init__()
        self.transformer = nn.ModuleDict({
            "wte": nn.Embedding(vocab, width),
            "wpe": nn.Embedding(seq, width),
            "h": nn.ModuleList(Gpt2Block(width, heads) for _ in range(layers)),
            "ln_f": nn.LayerNorm(width),
        })
        for name, p in self.named_parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02 / (math.sqrt(2 * layers) if "c_proj" in name else 1))
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, ids):
        t = self.transformer
        h = t["wte"](ids) + t["wpe"].weight
        for block in t["h"]:
            h = block(h)
        return F.linear(t["ln_f"](h), t["wte"].weight)


class BertLayer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        names = ["attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"]
        sizes = {**{name: (width, width) for name in names}, "intermediate.dense": (width, 4 * width),
                 "output.dense": (4 * width, width)}
        for name, (inputs, outputs) in sizes.items():
            put(self, name, Linear(inputs, outputs))
        for name in ("attention.output.LayerNorm", "output.LayerNorm"):
            put(self, name, nn.LayerNorm(width, eps=1e-12))

    def forward(self, h):
        a = self.attention
        q, k, v = (split_heads(x(h), self.heads) for x in (a.self.query, a.self.key, a.self.value))
        h = a.output.LayerNorm(h + a.output.dense(attend(q, k, v, False)))
        return self.output.LayerNorm(h + self.output.dense(F.gelu(self.intermediate.dense(h))))


class Bert(nn.Module):
    def __init__(self, layers, width, heads, seq, vocab):
        super().__init__()
        put(self, "bert.embeddings.word_embeddings", nn.Embedding(vocab, width))
        put(self, "bert.embeddings.position_embeddings", nn.Embedding(seq, width))
        put(self, "bert.embeddings.LayerNorm", nn.LayerNorm(width, eps=1e-12))
        put(self, "bert.encoder.layer", nn.ModuleList(BertLayer(width, heads) for _ in range(layers)))
        put(self, "cls.predictions.transform.dense", Linear(width, width))
        put(self, "cls.predictions.transform.LayerNorm", nn.LayerNorm(width, eps=1e-12))
        self.cls.predictions.bias = nn.Parameter(torch.zeros(vocab))
        for p in (p for p in self.parameters() if p.dim() == 2):
            nn.init.normal_(p, std=0.02)

    def forward(self, ids):
        e, head = self.bert.embeddings, self.cls.predictions
        h = e.LayerNorm(e.word_embeddings(ids) + e.position_embeddings.weight)
        for layer in self.bert.encoder.layer:
            h = layer(h)
        h = head.transform.LayerNorm(F.gelu(head.transform.dense(h)))
        return F.linear(h, e.word_embeddings.weight, head.bias)


def put(module, path, child):
    """Registers a module under a dotted path."""
    *parents, last = path.split(".")
    for name in parents:
        if name not in module._modules:
            module.add_module(name, nn.Module())
        module = module._modules[name]
    module.add_module(last, child)


def batch_norm(channels):
    # The JSON model keeps no running statistics either.
    return nn.BatchNorm2d(channels, track_running_stats=False)


class Bottleneck(nn.Module):
    def __init__(self, inputs, inner, outputs, stride, first):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, inner, 1, bias=False), batch_norm(inner)
        self.conv2, self.bn2 = nn.Conv2d(inner, inner, 3, stride, 1, bias=False), batch_norm(inner)
        self.conv3, self.bn3 = nn.Conv2d(inner, outputs, 1, bias=False), batch_norm(outputs)
        self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), batch_norm(outputs)) if first else None

    def forward(self, x):
        y = torch.relu(self.bn1(self.conv1(x)))
        y = self.bn3(self.conv3(torch.relu(self.bn2(self.conv2(y)))))
        return torch.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNet(nn.Module):
    def __init__(self, blocks, width, image, classes):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, width, 7, 2, 3, bias=False), batch_norm(width)
        self.maxpool, channels = nn.MaxPool2d(3, 2, 1), width
        for stage, n in enumerate(blocks):
            inner, layers = width * 2 ** stage, []
            for i in range(n):
                layers.append(Bottleneck(channels, inner, 4 * inner, 2 if stage and i == 0 else 1, i == 0))
                channels = 4 * inner
            self.add_module(f"layer{stage + 1}", nn.Sequential(*layers))
        self.stages = len(blocks)
        self.fc = Linear(channels, classes)
        for p in self.parameters():
            if p.dim() == 4:
                nn.init.kaiming_normal_(p, mode="fan_out")

    def forward(self, x):
        x = self.maxpool(torch.relu(self.bn1(self.conv1(x))))
        for stage in range(self.stages):
            x = getattr(self, f"layer{stage + 1}")(x)
        return self.fc(x.mean((2, 3)))


def build(name, padded):
    sizes = dict({**make_models.MODELS, **make_models.TINY}[name])
    kind = sizes.pop("kind")
    if padded and "vocab" in sizes:
        sizes["vocab"] = -(-sizes["vocab"] // 64) * 64
    return {"gpt2": Gpt2, "bert": Bert, "resnet": ResNet}[kind](**sizes), kind, sizes


def batches(path, batch, sizes):
    """Inputs and labels of every step, in the order in which Frit reads them, from the start again at the end."""
    if path.endswith(".bin"):
        tokens = torch.frombuffer(bytearray(open(path, "rb").read()), dtype=torch.uint16).to(torch.int64)
        seq = sizes["seq"]
        n = (len(tokens) - 1) // seq
        inputs, labels = (tokens[at:at + n * seq].view(n, seq) for at in (0, 1))
    else:
        data = load_file(path)
        inputs, labels = data["image"], data["labels"]
    per_epoch = len(inputs) // batch
    step = 0
    while True:
        at = step % per_epoch * batch
        yield inputs[at:at + batch], labels[at:at + batch]
        step += 1


def arguments():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", required=True, help="a model of make_models.py that is timed")
    p.add_argument("--data", required=True)
    p.add_argument("--batch", type=int, required=True)
    p.add_argument("--steps", type=int, required=True)
    p.add_argument("--json", required=True)
    p.add_argument("--mode", choices=["eager", "compile"], default="eager")
    p.add_argument("--precision", choices=["bf16", "fp32"], default="bf16")
    p.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    p.add_argument("--lr", type=float, default=1e-4)
    p.add_argument("--weights", help="first values of the parameters, as frit-run --save writes them")
    p.add_argument("--pad-vocab", action="store_true", help="the vocabulary as a multiple of 64")
    p.add_argument("--profile", action="store_true", help="count the kernels of one more step and the gaps between them")
    return p.parse_args()


def load(net, path):
    state = load_file(path)
    net.load_state_dict(state, strict=True)


def main():
    a = arguments()
    torch.manual_seed(0)
    # Plain f32 is f32: neither side rounds operands to tf32.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = True
    net, kind, sizes = build(a.model, a.pad_vocab)
    if a.weights:
        load(net, a.weights)
    net.to(a.device).train()
    images = kind == "resnet"
    if images:
        net.to(memory_format=torch.channels_last)
    forward = torch.compile(net) if a.mode == "compile" else net
    opt = torch.optim.AdamW(net.parameters(), lr=a.lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, fused=True)
    cuda = a.device == "cuda"
    autocast = torch.autocast(a.device, dtype=torch.bfloat16) if a.precision == "bf16" else contextlib.nullcontext()

    def move(x, like_image=False):
        if cuda:
            x = x.pin_memory().to(a.device, non_blocking=True)
        return x.contiguous(memory_format=torch.channels_last) if like_image else x

    def step(inputs, labels):
        inputs, labels = move(inputs, images), move(labels)
        with autocast:
            logits = forward(inputs)
            loss = F.cross_entropy(logits.flatten(0, -2), labels.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
        opt.zero_grad(set_to_none=True)
        return loss.detach()

    def wait():
        if cuda:
            torch.cuda.synchronize()

    feed = batches(a.data, a.batch, sizes)
    losses, seconds = [], []
    for _ in range(a.steps):
        inputs, labels = next(feed)
        wait()
        begin = time.perf_counter()
        losses.append(step(inputs, labels))
        wait()
        seconds.append(time.perf_counter() - begin)
    # Several steps without waiting in between: what the host may hide.
    warm = len(seconds) // 2
    begin, n = time.perf_counter(), max(len(seconds) - warm, 1)
    for _ in range(n):
        step(*next(feed))
    wait()
    unsynchronized = (time.perf_counter() - begin) / n
    found = {
        "model": a.model, "mode": a.mode, "precision": a.precision, "batch": a.batch, "torch": torch.__version__,
        "parameters": sum(p.numel() for p in net.parameters()),
        "losses": [float(x) for x in losses],
        "step_s": min(statistics.median(seconds[warm:]), unsynchronized),
        "first_step_s": seconds[0],
    }
    if cuda:
        free, total = torch.cuda.mem_get_info()
        found |= {
            "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
            "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
            "device_bytes": total - free,
        }
    if a.profile:
        found |= profile(step, feed, wait, cuda)
    with open(a.json, "w") as f:
        json.dump(found, f, indent=1)


def profile(step, feed, wait, cuda):
    """Kernels of one step and the part of its time in which none runs; operations on the CPU."""
    from torch.profiler import ProfilerActivity

    activity = ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as profiler:
        step(*next(feed))
        wait()
    device = torch.autograd.DeviceType.CUDA if cuda else torch.autograd.DeviceType.CPU
    spans = sorted((e.time_range.start, e.time_range.end) for e in profiler.events() if e.device_type == device)
    busy, end = 0.0, -math.inf
    for first, last in spans:
        busy += max(0.0, last - max(first, end))
        end = max(end, last)
    length = end - spans[0][0] if spans else 0.0
    return {"kernels": len(spans), "gap": 1 - busy / length if length else 0.0}


if __name__ == "__main__":
    main()
