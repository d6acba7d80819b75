#!/usr/bin/env python3
"""Write the archives of torch.export that the tests read, with PyTorch's numbers: small modules that hold what an ONNX file
loses. Run in this folder; needs torch and safetensors.

For each model NAME/ receives
    model.pt2              the program as `torch.export.export` traces it
    model_decomposed.pt2   the same after `run_decompositions()`, not of llama
    data.safetensors       one tensor per input and the labels, 20 global batches
    grads.safetensors      gradients of the first batch in fp64, by parameter
    state.safetensors      parameters and running statistics after 20 steps in fp32
    reference.json         losses of 20 AdamW steps in fp32, bf16 autocast and fp64
"""
import copy
import json
import pathlib
import warnings

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

STEPS = 20
BATCH = 8


class Mlp(nn.Module):
    """Running statistics, a detached branch, buffers of both kinds, a frozen parameter, activations in place."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(12, 16, bias=False), nn.Linear(16, 16, bias=False), nn.Linear(16, 5)
        self.bn1, self.bn2 = nn.BatchNorm1d(16), nn.BatchNorm1d(16, momentum=0.3, affine=False)
        self.register_buffer("offset", torch.linspace(-1, 1, 12))
        self.register_buffer("scale", torch.full((12,), 0.7), persistent=False)
        self.gate = nn.Parameter(torch.linspace(0.5, 1.5, 16), requires_grad=False)

    def forward(self, x):
        h = F.relu_(self.bn1(self.fc1((x - self.offset) * self.scale)))
        h = F.leaky_relu(self.bn2(self.fc2(h)), 0.1)
        return self.fc3(h * self.gate + h.detach() * 0.5)


class Residual(nn.Module):
    def __init__(self, i, o, stride):
        super().__init__()
        self.c1, self.b1 = nn.Conv2d(i, o, 3, stride, 1, bias=False), nn.BatchNorm2d(o)
        self.c2, self.b2 = nn.Conv2d(o, o, 3, 1, 1, bias=False), nn.BatchNorm2d(o)
        self.skip = nn.Sequential(nn.Conv2d(i, o, 1, stride, bias=False), nn.BatchNorm2d(o)) if stride > 1 else nn.Identity()
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        h = self.b2(self.c2(self.relu(self.b1(self.c1(x)))))
        h += self.skip(x)
        return self.relu(h)


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 5, 1, 2, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        self.body = nn.Sequential(Residual(6, 6, 1), Residual(6, 10, 2))
        self.head = nn.Linear(10 * 4, 7)

    def forward(self, x):
        h = F.avg_pool2d(self.body(self.stem(x)), 1)
        return self.head(torch.flatten(F.adaptive_avg_pool2d(h, 2), 1))


class GptBlock(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)
        self.drop, self.heads = nn.Dropout(0.0), heads

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.qkv(self.ln1(x)).split(d, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(y.transpose(1, 2).reshape(b, t, d)))
        return x + self.down(F.gelu(self.up(self.ln2(x)), approximate="tanh"))


class Gpt(nn.Module):
    """Tied weights."""

    def __init__(self, vocab=29, d=16):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, d), nn.Embedding(12, d)
        self.h = nn.ModuleList([GptBlock(d, 4) for _ in range(1)])
        self.ln_f, self.lm_head = nn.LayerNorm(d), nn.Linear(d, vocab, bias=False)
        self.lm_head.weight = self.wte.weight
        nn.init.normal_(self.wte.weight, std=0.3)

    def forward(self, input_ids):
        x = self.wte(input_ids) + self.wpe(torch.arange(input_ids.shape[1], device=input_ids.device))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


class RmsNorm(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))

    def forward(self, x):
        h = x.float()
        return self.weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Llama(nn.Module):
    """Rotary positions under no_grad, grouped heads, a mask that is computed."""

    def __init__(self, vocab=31, d=16, heads=4, groups=2):
        super().__init__()
        self.embed, self.head = nn.Embedding(vocab, d), nn.Linear(d, vocab, bias=False)
        self.n1, self.n2, self.norm = RmsNorm(d), RmsNorm(d), RmsNorm(d)
        size = d // heads
        self.q, self.k = nn.Linear(d, d, bias=False), nn.Linear(d, groups * size, bias=False)
        self.v, self.o = nn.Linear(d, groups * size, bias=False), nn.Linear(d, d, bias=False)
        self.gate, self.up, self.down = nn.Linear(d, 24, bias=False), nn.Linear(d, 24, bias=False), nn.Linear(24, d, bias=False)
        self.register_buffer("inv_freq", 1.0 / 100 ** (torch.arange(0, size, 2) / size), persistent=False)
        self.heads, self.groups, self.size = heads, groups, size

    @torch.no_grad()
    def angles(self, t, dtype):
        f = torch.arange(t).float()[:, None] * self.inv_freq[None].float()
        f = torch.cat([f, f], -1)
        return f.cos().to(dtype), f.sin().to(dtype)

    def rotate(self, x, cos, sin):
        a, b = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-b, a], -1) * sin

    def forward(self, input_ids):
        x = self.embed(input_ids)
        b, t, d = x.shape
        cos, sin = self.angles(t, x.dtype)
        h = self.n1(x)
        q = self.rotate(self.q(h).view(b, t, self.heads, self.size).transpose(1, 2), cos, sin)
        k = self.rotate(self.k(h).view(b, t, self.groups, self.size).transpose(1, 2), cos, sin)
        v = self.v(h).view(b, t, self.groups, self.size).transpose(1, 2)
        mask = torch.ones(t, t, dtype=torch.bool).tril()[None, None]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).reshape(b, t, d))
        h = self.n2(x)
        return self.head(self.norm(x + self.down(F.silu(self.gate(h)) * self.up(h))))


class Encoder(nn.Module):
    """Two inputs, a padding row, scores that are masked, a dict of results."""

    def __init__(self, vocab=23, d=16, heads=2):
        super().__init__()
        self.embed = nn.Embedding(vocab, d, padding_idx=0)
        self.position = nn.Parameter(torch.randn(1, 10, d) * 0.1)
        self.qkv, self.out, self.ln1, self.ln2 = nn.Linear(d, 3 * d), nn.Linear(d, d), nn.LayerNorm(d, eps=1e-12), nn.LayerNorm(d)
        self.up, self.down, self.head = nn.Linear(d, 32), nn.Linear(32, d), nn.Linear(d, 4)
        self.heads = heads

    def forward(self, input_ids, attention_mask):
        x = self.embed(input_ids) + self.position
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        scores = torch.einsum("bhtd,bhsd->bhts", q, k) / q.shape[-1] ** 0.5
        scores = scores.masked_fill(attention_mask[:, None, None, :] == 0, float("-inf"))
        y = torch.matmul(scores.softmax(-1), v).transpose(1, 2).flatten(2)
        x = self.ln1(x + self.out(y))
        x = self.ln2(x + self.down(F.gelu(self.up(x))))
        weight = attention_mask.to(x.dtype)[..., None]
        pooled = (x * weight).sum(1) / weight.sum(1).clamp(min=1)
        return {"logits": self.head(pooled), "pooled": torch.tanh(pooled)}


def tokens(t, vocab, g):
    return torch.randint(1, vocab, (BATCH * STEPS, t), generator=g)


def build(name, g):
    """-> module, inputs by name, labels."""
    n = BATCH * STEPS
    if name == "mlp":
        return Mlp(), {"x": torch.randn(n, 12, generator=g)}, torch.randint(0, 5, (n,), generator=g)
    if name == "resnet":
        return ResNet(), {"x": torch.randn(n, 3, 12, 12, generator=g)}, torch.randint(0, 7, (n,), generator=g)
    if name in ("gpt", "llama"):
        net, vocab = (Gpt(), 29) if name == "gpt" else (Llama(), 31)
        x = tokens(11, vocab, g)
        return net, {"input_ids": x[:, :-1].contiguous()}, x[:, 1:].contiguous()
    x = tokens(10, 23, g)
    mask = (torch.arange(10)[None] < torch.randint(4, 11, (n, 1), generator=g)).long()
    return Encoder(), {"input_ids": x * mask, "attention_mask": mask}, torch.randint(0, 4, (n,), generator=g)


def logits(net, xs):
    out = net(*xs)
    return out["logits"] if isinstance(out, dict) else out


def train(net, inputs, labels, mode):
    net = copy.deepcopy(net)
    if mode == "fp64":
        net, inputs = net.double(), {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
    opt = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-3, weight_decay=0.01)
    losses, first = [], None
    for s in range(STEPS):
        xs, y = [v[s * BATCH : (s + 1) * BATCH] for v in inputs.values()], labels[s * BATCH : (s + 1) * BATCH]
        opt.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=mode == "bf16"):
            out = logits(net, xs)
            out = out if mode == "fp64" else out.float()
            loss = F.cross_entropy(out.reshape(-1, out.shape[-1]), y.reshape(-1))
        loss.backward()
        if s == 0:
            first = {n: p.grad.detach().float().clone() for n, p in net.named_parameters() if p.grad is not None}
        torch.nn.utils.clip_grad_norm_([p for p in net.parameters() if p.requires_grad], 1.0)
        opt.step()
        losses.append(float(loss.detach()))
    return losses, first, net


def save(program, path, keep=("nn_module_stack",)):
    """Without stack traces, which hold local paths, and example inputs."""
    program._example_inputs = None
    for module in program.graph_module.modules():
        for node in getattr(getattr(module, "graph", None), "nodes", []):
            for key in {"stack_trace", "from_node", "nn_module_stack"} - set(keep):
                node.meta.pop(key, None)
    torch.export.save(program, path)


def main():
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    for name in ("mlp", "resnet", "gpt", "llama", "encoder"):
        torch.manual_seed(0)
        net, inputs, labels = build(name, torch.Generator().manual_seed(1))
        net.train()
        d = pathlib.Path(name)
        d.mkdir(exist_ok=True)
        example = tuple(v[:BATCH].clone() for v in inputs.values())
        shapes = {k: {0: torch.export.Dim("batch")} for k in inputs}
        program = torch.export.export(net, example, dynamic_shapes=shapes)
        if name != "llama":
            save(program.run_decompositions(), d / "model_decomposed.pt2", keep=())
        save(program, d / "model.pt2")
        save_file({**{k: v.contiguous() for k, v in inputs.items()}, "labels": labels}, d / "data.safetensors")
        reference = {"global_batch": BATCH, "steps": STEPS}
        for mode in ("fp32", "bf16", "fp64"):
            losses, first, trained = train(net, inputs, labels, mode)
            reference[mode] = {"loss": losses}
            if mode == "fp64":
                save_file({k: v.contiguous() for k, v in first.items()}, d / "grads.safetensors")
            if mode == "fp32":
                tied = {"lm_head.weight"} if name == "gpt" else set()
                state = {k: v.contiguous() for k, v in trained.state_dict().items() if k not in tied and v.is_floating_point()}
                save_file(state, d / "state.safetensors")
        (d / "reference.json").write_text(json.dumps(reference, indent=1) + "\n")
        print(name, reference["fp32"]["loss"][0], "->", reference["fp32"]["loss"][-1], flush=True)


if __name__ == "__main__":
    main()
