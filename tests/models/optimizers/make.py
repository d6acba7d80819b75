"""Losses and parameters of a linear layer under PyTorch's optimizers, schedules and clipping, in float64.

    python3 tests/models/optimizers/make.py

writes reference.json: for each case the equivalent settings of train.toml, the loss of every step, and
the parameters (and their moving average) after the last.
"""

import json
import pathlib

import torch
from torch.optim import lr_scheduler as schedules
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

BATCH, STEPS = 4, 20
torch.set_default_dtype(torch.float64)


def number(i, seed):
    return (i * 7919 + seed * 104_729) % 2039 / 1024 - 1


X = torch.tensor([number(i, 1) for i in range(BATCH * STEPS * 3)]).reshape(-1, 3)
LABELS = torch.tensor([number(i, 2) for i in range(BATCH * STEPS * 2)]).reshape(-1, 2)


class Linear(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.full((3, 2), 0.5))
        self.b = torch.nn.Parameter(torch.full((2,), 0.25))

    def forward(self, x):
        return x @ self.w + self.b


def warm(optimizer, after):
    up = schedules.LinearLR(optimizer, start_factor=0.25, total_iters=3)
    return schedules.SequentialLR(optimizer, [up, after(optimizer)], milestones=[4])


def train(case):
    model = Linear()
    optimizer = case["optimizer"](model)
    schedule = case.get("schedule", lambda o: schedules.ConstantLR(o, factor=1.0))(optimizer)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)) if case.get("ema") else None
    micro_steps, n = case.get("micro_steps", 1), case.get("examples", len(X))
    losses, first = [], 0
    while len(losses) < STEPS:
        if first + BATCH > n:
            first = 0
        count = min(micro_steps, (n - first) // BATCH)
        optimizer.zero_grad()
        rows = slice(first, first + count * BATCH)
        loss = torch.nn.functional.mse_loss(model(X[rows]), LABELS[rows])
        first += count * BATCH
        loss.backward()
        losses.append(loss.item())
        if "clip_norm" in case:
            torch.nn.utils.clip_grad_norm_(model.parameters(), case["clip_norm"])
        if "clip_value" in case:
            torch.nn.utils.clip_grad_value_(model.parameters(), case["clip_value"])
        optimizer.step()
        schedule.step()
        if average:
            average.update_parameters(model)
    flat = lambda m: {"w": m.w.flatten().tolist(), "b": m.b.tolist()}
    result = {"toml": case.get("toml", ""), "settings": case["settings"], "losses": losses, "params": flat(model)}
    if average:
        result["ema"] = flat(average.module)
    return result


def of(kind, **options):
    return lambda model: kind(model.parameters(), lr=0.05, **options)


def grouped(kind, **options):
    return lambda model: kind(
        [{"params": [model.w]}, {"params": [model.b], "lr": 0.01, "weight_decay": 0.0}], lr=0.05, **options
    )


SGD = of(torch.optim.SGD)
ADAM = {"betas": (0.9, 0.99), "weight_decay": 0.1}
DECAY = "optimizer.weight_decay=0.1"
BETAS = "optimizer.betas=[0.9, 0.99]"
PLAIN = ["optimizer.kind=sgd", "optimizer.weight_decay=0"]
CASES = {
    "sgd": {"optimizer": of(torch.optim.SGD, weight_decay=0.1), "settings": ["optimizer.kind=sgd", DECAY]},
    "momentum": {
        "optimizer": of(torch.optim.SGD, momentum=0.8, dampening=0.25, weight_decay=0.1),
        "settings": ["optimizer.kind=momentum", "optimizer.momentum=0.8", "optimizer.dampening=0.25", DECAY],
    },
    "nesterov": {
        "optimizer": of(torch.optim.SGD, momentum=0.8, nesterov=True, weight_decay=0.1),
        "settings": ["optimizer.kind=nesterov", "optimizer.momentum=0.8", DECAY],
    },
    "adam": {"optimizer": of(torch.optim.Adam, **ADAM), "settings": ["optimizer.kind=adam", BETAS, DECAY]},
    "adamw": {"optimizer": of(torch.optim.AdamW, **ADAM), "settings": ["optimizer.kind=adamw", BETAS, DECAY]},
    # The least mean square is that of float32, as a float32 run takes it.
    "adafactor": {
        "optimizer": of(torch.optim.Adafactor, weight_decay=0.1, eps=(2.0**-23, 1e-3)),
        "settings": ["optimizer.kind=adafactor", DECAY],
    },
    "groups": {
        "optimizer": grouped(torch.optim.AdamW, **ADAM),
        "toml": '[[optimizer.group]]\nscope = "b"\nlr = 0.01\nweight_decay = 0.0\n',
        "settings": [
            "optimizer.kind=adamw",
            BETAS,
            DECAY,
            "schedule.kind=step",
            "schedule.step_size=6",
            "schedule.gamma=0.5",
        ],
        "schedule": lambda o: schedules.StepLR(o, step_size=6, gamma=0.5),
    },
    "clip_norm": {"optimizer": SGD, "settings": [*PLAIN, "optimizer.clip_grad_norm=0.5"], "clip_norm": 0.5},
    "clip_value": {"optimizer": SGD, "settings": [*PLAIN, "optimizer.clip_grad_value=0.1"], "clip_value": 0.1},
    "linear": {
        "optimizer": SGD,
        "settings": [*PLAIN, "schedule.kind=linear", "schedule.total_steps=16", "schedule.min_lr=0.005"],
        "schedule": lambda o: schedules.LinearLR(o, start_factor=1.0, end_factor=0.1, total_iters=16),
    },
    "cosine": {
        "optimizer": SGD,
        "settings": [
            *PLAIN,
            "schedule.kind=cosine",
            "schedule.warmup_steps=4",
            "schedule.total_steps=24",
            "schedule.min_lr=0.005",
        ],
        "schedule": lambda o: warm(o, lambda o: schedules.CosineAnnealingLR(o, T_max=20, eta_min=0.005)),
    },
    "step": {
        "optimizer": SGD,
        "settings": [
            *PLAIN,
            "schedule.kind=step",
            "schedule.warmup_steps=4",
            "schedule.step_size=5",
            "schedule.gamma=0.5",
        ],
        "schedule": lambda o: warm(o, lambda o: schedules.StepLR(o, step_size=5, gamma=0.5)),
    },
    "one_cycle": {
        "optimizer": SGD,
        "settings": [*PLAIN, "schedule.kind=one_cycle", "schedule.total_steps=21", "schedule.pct_start=0.4"],
        "schedule": lambda o: schedules.OneCycleLR(
            o, max_lr=0.05, total_steps=21, pct_start=0.4, cycle_momentum=False
        ),
    },
    "ema": {"optimizer": SGD, "settings": [*PLAIN, "optimizer.ema=0.9"], "ema": True},
    "remainder": {
        "optimizer": SGD,
        "settings": [*PLAIN, "run.accumulation=3", "data.drop_last=false"],
        "micro_steps": 3,
        "examples": 35,
    },
}

if __name__ == "__main__":
    reference = {"torch": torch.__version__, "examples": len(X), "cases": {}}
    for name, case in CASES.items():
        reference["cases"][name] = train(case)
    path = pathlib.Path(__file__).with_name("reference.json")
    path.write_text(json.dumps(reference, indent=1) + "\n")
