"""What torch traces of modules: where gradients stop, and modules that ONNX has no form of."""

import copy
import warnings
from pathlib import Path

import numpy as np
import pytest

import frit

SGD = {"kind": "sgd", "lr": 0.1, "weight_decay": 0.0, "momentum": 0.0, "clip_grad_norm": 1e9}
STEPS = 4


def trained(torch, module, inputs, **options):
    """Losses of the plan and of torch over the steps, and both states. Of several ranks and micro-steps, torch sees all examples."""
    parts = options.get("ranks", 1) * options.get("accumulation", 1)
    example = {k: v[: len(v) // parts] for k, v in inputs.items()}
    plan = frit.compile(module, example, loss="output", precision="fp32", optimizer=SGD, **options)
    with plan.trainer() as trainer:
        found = [trainer.step(inputs)["loss"] for _ in range(STEPS)]
        state = trainer.state_dict()
    reference, expected = copy.deepcopy(module).train(), []
    own = torch.optim.SGD(reference.parameters(), lr=0.1)
    for _ in range(STEPS):
        loss = reference(**inputs)["loss"]
        own.zero_grad()
        loss.backward()
        own.step()
        expected.append(loss.item())
    return plan, found, expected, state, reference.state_dict()


def is_archived(plan):
    """Whether there was no ONNX form of its module."""
    return (Path(plan._holder.path) / "model.pt2").exists()


def check(found, expected, state, reference, rel=3e-6):
    assert found == pytest.approx(expected, rel=rel, abs=1e-6)
    assert list(state) == list(reference)
    for name, value in reference.items():
        if "num_batches" not in name:
            assert np.allclose(state[name], value, rtol=1e-4, atol=2e-6), name


def regions(torch):
    """Forwards in which gradients stop, by name: of two layers and an input."""
    functional, checkpoint = torch.nn.functional, torch.utils.checkpoint.checkpoint

    def no_grad(m, x):
        with torch.no_grad():
            t = m.b(m.a(x))
        return m.a(x) - t

    def several(m, x):
        h = m.a(x)
        with torch.no_grad():
            t, u = m.b(h), h.view(-1)
        return h * t + u.view_as(h)

    def function(m, x):
        h = m.a(x)
        before = torch.is_grad_enabled()
        torch.set_grad_enabled(False)
        t = m.b(h)
        torch.set_grad_enabled(before)
        return h * t

    @torch.no_grad()
    def teacher(m, x):
        return m.b(x).softmax(-1)

    def decorated(m, x):
        h = m.a(x)
        return functional.log_softmax(h, -1) * teacher(m, h)

    def inference(m, x):
        h = m.a(x)
        with torch.inference_mode():
            t = m.b(m.a(x))
        return h * t.clone()

    def nested(m, x):
        h = m.a(x)
        with torch.no_grad():
            t = m.b(h)
            with torch.enable_grad():
                q = m.a(t) * h
            v = q * 2
        return h * t + q + v

    def fresh(m, x):
        h = m.a(x)
        with torch.no_grad():
            t = m.b(h)
            t.clamp_(-0.5, 0.5)
            t[:, 0] = 0
        return h * t

    def fixed_point(m, x):
        with torch.no_grad():
            z = torch.zeros_like(x)
            for _ in range(5):
                z = torch.tanh(m.a(z) + x)
        return torch.tanh(m.a(z) + m.b(x))

    def data(m, x):
        h = m.a(x)
        return h.data * h + m.b.weight.data.sum() + m.b(x)

    def detached(m, x):
        t = m.b(m.a(x)).detach()
        t.clamp_(-0.5, 0.5)
        return m.a(x) * t

    def reentrant(m, x):
        return checkpoint(m.b, m.a(x), use_reentrant=True)

    def other(m, x):
        return checkpoint(m.b, m.a(x), use_reentrant=False)

    def autocast(m, x):
        h = m.a(x)
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            t = m.b(h)
        return h * t

    own = [no_grad, several, function, decorated, inference, nested, fresh, fixed_point, data, detached, reentrant, other, autocast]
    return {f.__name__: f for f in own}


NAMES = "no_grad several function decorated inference nested fresh fixed_point data detached reentrant other autocast"


def two(torch, forward):
    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, x):
            y = forward(self, x)
            return {"loss": (y * y).mean() + (x * y).sum() / 8}

    torch.manual_seed(0)
    return Two()


@pytest.mark.parametrize("name", NAMES.split())
def test_gradients_stop_where_they_stop_in_the_module(torch, name):
    forward = regions(torch)[name]
    _, *compared = trained(torch, two(torch, forward), {"x": torch.randn(8, 4)})
    check(*compared)


def test_an_export_without_gradients_has_them(torch):
    module, x = two(torch, regions(torch)["no_grad"]), torch.randn(8, 4)
    with torch.no_grad():
        plan = frit.compile(module, x, loss="output", precision="fp32", optimizer=SGD)
    assert {r["parameter"] for r in plan.units if r["kind"] == "trainable"} >= {"a.weight", "a.bias"}
    with plan.trainer() as trainer:
        assert trainer.step([x])["grad_norm"] > 0


def test_writes_without_gradients_are_refused(torch):
    def activation(m, x):
        h = m.a(x)
        with torch.no_grad():
            h.clamp_(0, 1)
        return m.b(h)

    def part(m, x):
        h = m.a(x)
        with torch.no_grad():
            h.chunk(2, -1)[0].mul_(2)
        return m.b(h)

    def detached(m, x):
        h = m.a(x)
        h.detach().clamp_(0, 1)
        return m.b(h)

    def parameter(m, x):
        with torch.no_grad():
            m.b.weight.clamp_(-0.1, 0.1)
        return m.b(m.a(x))

    def data(m, x):
        m.b.weight.data.clamp_(-0.1, 0.1)
        return m.b(m.a(x))

    def average(m, x):
        h = m.a(x)
        with torch.no_grad():
            m.mean.mul_(0.9).add_(h.mean(0), alpha=0.1)
        return m.b(h) - m.mean

    def unread(m, x):
        h = m.a(x)
        with torch.no_grad():
            m.mean.mul_(0.9).add_(h.mean(0), alpha=0.1)
        return m.b(h)

    x = torch.randn(8, 4)
    written = {activation: "linear", part: "linear", detached: "linear", parameter: "b.weight", data: "b.weight", average: "mean"}
    for forward, name in written.items():
        with pytest.raises(frit.FritError, match=rf"\[E032\] `forward` writes .*`{name}`") as refused:
            frit.compile(two(torch, forward), x, loss="output")
        assert refused.value.remedy
    with pytest.warns(frit.FritWarning, match="writes `mean`, and a plan does not"):
        _, *compared = trained(torch, two(torch, unread), {"x": x})
    compared[3].pop("mean"), compared[2].pop("mean")
    check(*compared)


def losses(torch):
    """Losses that the exporter alone fails on, by name: of a layer's result `h`, the module and an input of integers."""
    functional = torch.nn.functional

    def soft(reduction, smoothing=0.0, weighted=False, spatial=False):
        def loss(m, h, ids):
            p = torch.softmax(m.b(h), -1)
            if spatial:
                h, p = h.view(2, 4, -1), p.view(2, 4, -1)
            weight = torch.tensor([0.5, 1.0, 2.0, 1.5]) if weighted else None
            found = functional.cross_entropy(h, p, weight, reduction=reduction, label_smoothing=smoothing)
            return (found * found).mean() if reduction == "none" else found

        return loss

    def distances(p, rows=0, **own):
        def loss(m, h, ids):
            other = m.b.weight.repeat(1 + rows, 1) * torch.arange(1.0, 2.0 + rows).repeat_interleave(4)[:, None]
            near = torch.cdist(h[:4], h[:4], p, **own)
            return torch.cdist(h, other, p, **own).square().mean() + near.mean()

        return loss

    def triplets(m, h, ids):
        near = torch.cdist(h, h)
        return (near.max(-1).values - near.min(-1).values + 0.1).relu().mean()

    def checked(m, h, ids):
        torch._check_tensor_all(ids >= 0, lambda: "negative")
        return h.square().mean()

    def complement(m, h, ids):
        mask = (ids > 1).long()
        return (h * (1.0 - mask)[:, None] + (0.5 - ids)[:, None] * h + (1 - ids)[:, None] * h).square().mean()

    def diagonal(m, h, ids):
        near = h @ h.T
        near.fill_diagonal_(-1e4)
        return functional.cross_entropy(near, ids)

    found = {f.__name__: f for f in (triplets, checked, complement, diagonal)}
    for reduction in ("mean", "sum", "none"):
        found[f"soft_{reduction}"] = soft(reduction)
        found[f"soft_{reduction}_all"] = soft(reduction, 0.1, True, True)
    found["soft_smooth"], found["soft_weight"] = soft("mean", 0.2), soft("mean", weighted=True)
    for p in (1.0, 1.5, 2.0, 3.0):
        found[f"cdist_{p}"] = distances(p)
    found["cdist_many"] = distances(2.0, 7)
    return found


LOSSES = "triplets checked complement diagonal soft_mean soft_sum soft_none soft_mean_all soft_sum_all soft_none_all soft_smooth soft_weight"
LOSSES += " cdist_1.0 cdist_1.5 cdist_2.0 cdist_3.0 cdist_many"


@pytest.mark.parametrize("name", LOSSES.split())
def test_losses_are_those_of_torch(torch, name):
    loss = losses(torch)[name]

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

        def forward(self, x, ids):
            return {"loss": loss(self, self.a(x), ids)}

    torch.manual_seed(0)
    inputs = {"x": torch.randn(8, 4), "ids": torch.randint(0, 4, (8,))}
    plan, *compared = trained(torch, Model(), inputs)
    check(*compared)
    assert not is_archived(plan)
