#!/usr/bin/env python3
"""Trains one of make_models.py's models with PyTorch and writes what it took: the other side of check.sh's table.

The model is the same as the JSON one, parameter by parameter, so that --weights can read what `frit-run --save` wrote;
batches, clipping and optimizer are the same, too. What PyTorch offers to be fast is used: autocast in bf16 (TF32 where f32
is left), fused AdamW, pinned inputs that are copied while the host goes on, scaled_dot_product_attention with the fastest
backend for the model's sizes, which is measured first, channels last and cuDNN's benchmark for images; --pad-vocab makes the
vocabulary a multiple of 64. With a --mode other than eager, model and loss are compiled together in that mode of
torch.compile.

After --warm-up steps, which compile and capture, every step is timed from the host, synchronized before and after, and the
median counts; then as many steps run without synchronizing in between, and if their mean is less, it counts.

    peer.py --model NAME --data FILE --batch N --steps N --json OUT [...]    train
    peer.py --model NAME --batch N --images FILE.safetensors                 write two batches of random images
    peer.py --versions                                                       what is installed, as JSON
"""

import argparse
import contextlib
import json
import math
import statistics
import sys
import time

import make_models
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

MODES = ["eager", "default", "max-autotune-no-cudagraphs", "reduce-overhead"]
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION,
            "efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH}


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
    p.add_argument("--model", help="a model of make_models.py that is timed")
    p.add_argument("--data")
    p.add_argument("--batch", type=int)
    p.add_argument("--steps", type=int)
    p.add_argument("--json")
    p.add_argument("--mode", choices=MODES, default="eager")
    p.add_argument("--warm-up", type=int, default=10, help="of the steps, those that are not timed; at most half")
    p.add_argument("--precision", choices=["bf16", "fp32"], default="bf16")
    p.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    p.add_argument("--lr", type=float, default=1e-4)
    p.add_argument("--weights", help="first values of the parameters, as frit-run --save writes them")
    p.add_argument("--pad-vocab", action="store_true", help="the vocabulary as a multiple of 64")
    p.add_argument("--profile", action="store_true", help="count the kernels of one more step and the gaps between them")
    p.add_argument("--images", metavar="FILE", help="write two batches of images, and end")
    p.add_argument("--versions", action="store_true", help="print what is installed, and end")
    return p.parse_args()


def versions():
    found = {"torch": torch.__version__, "python": sys.version.split()[0], "path": torch.__path__[0]}
    if torch.cuda.is_available():
        found |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(), "gpu": torch.cuda.get_device_name(),
                  "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    return found


def write_images(name, batch, path):
    sizes, n = {**make_models.MODELS, **make_models.TINY}[name], 2 * batch
    g = torch.Generator().manual_seed(0)
    images = torch.randn(n, 3, sizes["image"], sizes["image"], generator=g)
    save_file({"image": images, "labels": torch.randint(0, sizes["classes"], (n,), generator=g)}, path)


def load(net, path):
    """Reads the parameters; rows that only pad the vocabulary are zero."""
    state = load_file(path)
    for name, p in net.named_parameters():
        rows = p.shape[0] - state[name].shape[0] if name.endswith(("wte.weight", "word_embeddings.weight")) else 0
        if rows > 0:
            state[name] = F.pad(state[name], (0, 0, 0, rows))
    net.load_state_dict(state, strict=True)


def choose_attention(kind, sizes, batch, a):
    """Lets attention run on the backend that is fastest for these sizes, forward and backward: milliseconds of each."""
    if a.device != "cuda" or a.precision != "bf16" or kind == "resnet":
        return {}
    width, ms = sizes["width"], {}
    for name, backend in BACKENDS.items():
        try:
            x = torch.randn(batch, sizes["seq"], 3 * width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            grad = torch.randn(batch, sizes["seq"], width, device="cuda", dtype=torch.bfloat16)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            for i in range(15):
                if i == 5:
                    begin.record()
                with sdpa_kernel([backend]):
                    attend(*(split_heads(part, sizes["heads"]) for part in x.chunk(3, dim=2)), kind == "gpt2").backward(grad)
            end.record()
            end.synchronize()
            ms[name] = begin.elapsed_time(end) / 10
        except RuntimeError:
            pass  # It does not take these sizes, or there is too little memory for it.
    best = min(ms, key=ms.get, default=None)
    if best:
        cuda = torch.backends.cuda
        for name, enable in (("flash", cuda.enable_flash_sdp), ("cudnn", cuda.enable_cudnn_sdp),
                             ("efficient", cuda.enable_mem_efficient_sdp), ("math", cuda.enable_math_sdp)):
            enable(name == best)
        print(f"attention by {best}:", ", ".join(f"{name} {t:.2f} ms" for name, t in ms.items()), flush=True)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return ms


def main():
    a = arguments()
    if a.versions:
        return print(json.dumps(versions()))
    if a.images:
        return write_images(a.model, a.batch, a.images)
    torch.manual_seed(0)
    # Plain f32 is f32: neither side rounds operands to TF32. In bf16 there is nothing to be exact about.
    tf32 = a.precision == "bf16"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
    torch.backends.cudnn.benchmark = True
    net, kind, sizes = build(a.model, a.pad_vocab)
    if a.weights:
        load(net, a.weights)
    sdpa = choose_attention(kind, sizes, a.batch, a)
    net.to(a.device).train()
    images = kind == "resnet"
    if images:
        net.to(memory_format=torch.channels_last)
    opt = torch.optim.AdamW(net.parameters(), lr=a.lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, fused=True)
    cuda = a.device == "cuda"

    def loss_of(inputs, labels):
        autocast = torch.autocast(a.device, dtype=torch.bfloat16) if a.precision == "bf16" else contextlib.nullcontext()
        with autocast:
            logits = net(inputs)
            return F.cross_entropy(logits.flatten(0, -2), labels.flatten())

    forward = loss_of if a.mode == "eager" else torch.compile(loss_of, mode=a.mode)

    def move(x, like_image=False):
        if cuda:
            x = x.pin_memory().to(a.device, non_blocking=True)
        return x.contiguous(memory_format=torch.channels_last) if like_image else x

    def step(inputs, labels):
        torch.compiler.cudagraph_mark_step_begin()
        loss = forward(move(inputs, images), move(labels))
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
        opt.zero_grad(set_to_none=True)
        # A captured graph writes the next loss to the same place.
        return loss.detach().clone()

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
    warm = min(a.warm_up, len(seconds) // 2)
    begin, n = time.perf_counter(), max(len(seconds) - warm, 1)
    for _ in range(n):
        step(*next(feed))
    wait()
    unsynchronized = (time.perf_counter() - begin) / n
    synchronized = statistics.median(seconds[warm:])
    found = {
        "model": a.model, "mode": a.mode, "precision": a.precision, "batch": a.batch, "torch": torch.__version__,
        "parameters": sum(p.numel() for p in net.parameters()),
        "losses": [float(x) for x in losses],
        "step_s": min(synchronized, unsynchronized), "synchronized_s": synchronized, "unsynchronized_s": unsynchronized,
        "warm_up": warm, "first_step_s": seconds[0],
        "sdpa": min(sdpa, key=sdpa.get, default=None), "sdpa_ms": sdpa,
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
    """Kernels of one step, those of attention by name, and the part of its time in which none runs; operations on the CPU."""
    from torch.profiler import ProfilerActivity

    activity = ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as profiler:
        step(*next(feed))
        wait()
    device = torch.autograd.DeviceType.CUDA if cuda else torch.autograd.DeviceType.CPU
    events = [e for e in profiler.events() if e.device_type == device]
    spans = sorted((e.time_range.start, e.time_range.end) for e in events)
    busy, end = 0.0, -math.inf
    for first, last in spans:
        busy += max(0.0, last - max(first, end))
        end = max(end, last)
    length = end - spans[0][0] if spans else 0.0
    attention = sorted({e.name[:120] for e in events if any(part in e.name.lower() for part in ("flash", "fmha", "sdpa", "attention"))})
    return {"kernels": len(spans), "gap": 1 - busy / length if length else 0.0, "attention_kernels": attention}


if __name__ == "__main__":
    main()
