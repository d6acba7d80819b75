"""Losses and parameters of a small residual network under torch.optim.Muon, and AdamW for what Muon does not step.

    python3 tests/models/muon/make.py

writes reference.json: for each case the equivalent settings of train.toml, the loss of every step, and the parameters (and their moving
average) after the last. Parameters and gradients are float64; Muon orthogonalizes in bfloat16 all the same, so the last bit of a gradient
may decide how a momentum is rounded, and float32 and float64 then part by 1e-3. Each case has data, by its seed, on which they do not.
"""

import json
import pathlib

import torch
from torch.optim import lr_scheduler as schedules
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

BATCH, STEPS, INPUTS, OUTPUTS = 4, 10, 6, 2
torch.set_num_threads(1)

# Wide, square, wide and tall; then what Muon does not step.
SHAPES = {"a": (6, 8), "b": (8, 8), "c": (8, 20), "d": (20, 8), "bias": (8,), "head": (8, 2), "head_bias": (2,)}
MUON = ["a", "b", "c", "d"]


def number(i, seed):
    return (i * 7919 + seed * 104_729) % 2039 / 1024 - 1


def numbers(n, seed):
    return torch.tensor([number(i, seed) for i in range(n)])


def rounded(values):
    return [float(f"{x:.8g}") for x in values]


class Residual(torch.nn.Module):
    def __init__(self):
        super().__init__()
        for seed, (name, shape) in enumerate(SHAPES.items()):
            values = numbers(torch.Size(shape).numel(), seed) / 2
            self.register_parameter(name, torch.nn.Parameter(values.reshape(shape)))

    def forward(self, x):
        h = torch.tanh(x @ self.a + self.bias)
        h = h + torch.tanh(h @ self.b)
        h = h + torch.tanh(h @ self.c) @ self.d
        return h @ self.head + self.head_bias


def train(case, seed):
    x = numbers(BATCH * STEPS * INPUTS, seed).reshape(-1, INPUTS)
    labels = numbers(BATCH * STEPS * OUTPUTS, seed + 1).reshape(-1, OUTPUTS)
    model = Residual()
    params = dict(model.named_parameters())
    muon = case.get("muon_params", MUON)
    optimizers = [
        torch.optim.Muon(case.get("muon_groups", lambda p: [p[n] for n in muon])(params), **MUON_BASE | case.get("muon", {})),
        torch.optim.AdamW([p for n, p in params.items() if n not in muon], **ADAMW_BASE | case.get("adamw", {})),
    ]
    after = [case["schedule"](o) for o in optimizers] if "schedule" in case else []
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.75)) if case.get("ema") else None
    losses = []
    for step in range(STEPS):
        rows = slice(step * BATCH, (step + 1) * BATCH)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x[rows]), labels[rows])
        loss.backward()
        losses.append(loss.item())
        if "clip_norm" in case:
            torch.nn.utils.clip_grad_norm_(model.parameters(), case["clip_norm"])
        if "clip_value" in case:
            torch.nn.utils.clip_grad_value_(model.parameters(), case["clip_value"])
        for each in [*optimizers, *after]:
            each.step()
        if average:
            average.update_parameters(model)
    flat = lambda m: {name: rounded(getattr(m, name).flatten().tolist()) for name in SHAPES}
    result = {"losses": rounded(losses), "params": flat(model)}
    if average:
        result["ema"] = flat(average.module)
    return result


def agree(a, b):
    return all(abs(x - y) < 1e-6 for name, values in a["params"].items() for x, y in zip(values, b["params"][name]))


def reference(case):
    for seed in range(case.get("first_seed", 10), 100, 2):
        both = []
        for dtype in (torch.float64, torch.float32):
            torch.set_default_dtype(dtype)
            both.append(train(case, seed))
        if agree(*both):
            return {"toml": case.get("toml", ""), "settings": case["settings"], "seed": seed} | both[0]
    raise SystemExit("no data on which float32 and float64 agree")


# What is rounded in another way to bfloat16 moves a parameter by a thousandth of this.
LR, DECAY = 0.0005, 0.1
MUON_BASE = {"lr": LR, "weight_decay": DECAY}
ADAMW_BASE = {"lr": LR, "weight_decay": DECAY, "betas": (0.9, 0.99)}
CASES = {
    "default": {"settings": []},
    "plain": {
        "muon": {"nesterov": False, "momentum": 0.8},
        "settings": ["optimizer.muon_nesterov=false", "optimizer.muon_momentum=0.8"],
    },
    "match_rms_adamw": {
        "muon": {"adjust_lr_fn": "match_rms_adamw"},
        "settings": ["optimizer.muon_adjust_lr=match_rms_adamw"],
    },
    "spectral_unclamped": {
        "first_seed": 16,
        "muon": {"adjust_lr_fn": "spectral_unclamped"},
        "settings": ["optimizer.muon_adjust_lr=spectral_unclamped"],
    },
    "iterations": {
        "muon": {"ns_steps": 3, "ns_coefficients": (3.0, -3.2, 1.2), "eps": 1e-3},
        "settings": [
            "optimizer.muon_ns_steps=3",
            "optimizer.muon_ns_coefficients=[3.0, -3.2, 1.2]",
            "optimizer.muon_ns_eps=1e-3",
        ],
    },
    "two_rates": {
        "adamw": {"lr": 0.0002, "weight_decay": 0.02},
        "settings": ["optimizer.adamw_lr=0.0002", "optimizer.adamw_weight_decay=0.02"],
    },
    "groups": {
        "muon_params": ["a", "c", "d", "head"],
        "muon_groups": lambda p: [
            {"params": [p["a"], p["head"]]},
            {"params": [p["c"], p["d"]], "lr": 0.0002, "weight_decay": 0.5},
        ],
        "toml": '[[optimizer.group]]\nscope = "head"\nkind = "muon"\n[[optimizer.group]]\nscope = "b"\nkind = "adamw"\n'
        '[[optimizer.group]]\nscope = "c"\nlr = 0.0002\nweight_decay = 0.5\n'
        '[[optimizer.group]]\nscope = "d"\nlr = 0.0002\nweight_decay = 0.5\n',
        "settings": [],
    },
    "clip_norm": {"settings": ["optimizer.clip_grad_norm=0.25"], "clip_norm": 0.25},
    "clip_value": {"settings": ["optimizer.clip_grad_value=0.05"], "clip_value": 0.05},
    "cosine": {
        "settings": ["schedule.kind=cosine", "schedule.total_steps=10", "schedule.min_lr=0.00005"],
        "schedule": lambda o: schedules.CosineAnnealingLR(o, T_max=10, eta_min=0.00005),
    },
    "ema": {"settings": ["optimizer.ema=0.75"], "ema": True},
}

if __name__ == "__main__":
    cases = ",\n".join(f"{json.dumps(name)}: {json.dumps(reference(case))}" for name, case in CASES.items())
    path = pathlib.Path(__file__).with_name("reference.json")
    path.write_text(f'{{"torch": "{torch.__version__}", "cases": {{\n{cases}\n}}}}\n')
