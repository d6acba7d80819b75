"""What torch traces of modules: where gradients stop, and modules that ONNX has no form of."""

import copy
import warnings
from pathlib import Path

import numpy as np
import pytest
from conftest import skip_without

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
    reference, expected = copy.deepcopy(module), []
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


# Not an assertion of this file: pytest rewrites these, and dynamo does not know them so.
exec("def assert_small(x):\n    assert (x < 100).all(), 'too large'")


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

    def asserted(m, x):
        assert_small(x)
        with torch.no_grad():
            t = m.b(m.a(x))
        return m.a(x) - t

    def result(m, x):
        h = m.a(x)
        with torch.no_grad():
            t = m.b(h)
        return h * t, t

    def autocast(m, x):
        h = m.a(x)
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            t = m.b(h)
        return h * t

    own = [no_grad, several, function, decorated, inference, nested, fresh, fixed_point, data, detached, reentrant, other]
    own += [asserted, result, autocast]
    return {f.__name__: f for f in own}


NAMES = "no_grad several function decorated inference nested fresh fixed_point data detached reentrant other asserted result autocast"


def two(torch, forward):
    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, x):
            y = forward(self, x)
            y, t = y if isinstance(y, tuple) else (y, None)
            return {"loss": (y * y).mean() + (x * y).sum() / 8, "t": t}

    torch.manual_seed(0)
    return Two()


@pytest.mark.parametrize("name", NAMES.split())
def test_gradients_stop_where_they_stop_in_the_module(torch, name):
    forward = regions(torch)[name]
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", frit.FritWarning)
        _, *compared = trained(torch, two(torch, forward), {"x": torch.randn(8, 4)})
    check(*compared)
    assert {str(w.message)[:6] for w in found if w.category is frit.FritWarning} <= {"[W061]"}


def test_what_dynamo_forgets_is_refused(torch):
    class Round(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return torch.round(x)

        @staticmethod
        def backward(ctx, dy):
            return dy

    def function(m, x):
        return Round.apply(m.a(x))

    def data(m, x):
        h = m.a(x)
        return h.data * h

    def inference(m, x):
        with torch.inference_mode():
            t = m.b(m.a(x))
        return m.a(x) * t.clone()

    for forward in (function, data, inference):

        def asserted(m, x, forward=forward):
            assert_small(x)
            return forward(m, x)

        with pytest.raises(frit.FritError, match=r"\[E010\].* depends on data"):
            frit.compile(two(torch, asserted), torch.randn(8, 4), loss="output")


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


def own_writes(torch):
    """Forwards that write what is there already, by name: of two layers and an input."""

    def moved(m, x):
        return m.a.to(x.device)(x) - m.b.float()(x)

    def whole(m, x):
        m.to(x.device, x.dtype)
        return m.a(x) + m.mean

    def copied(m, x):
        with torch.no_grad():
            m.a.weight.copy_(m.a.weight)
        return m.a(x)

    def data(m, x):
        m.a.weight.data = m.a.weight.data.to(x.dtype)
        m.mean.data = m.mean.data.to(x.device)
        return m.a(x) + m.mean

    def buffer(m, x):
        m.mean = m.mean.to(x.device)
        m.mean.copy_(m.mean.to(x.dtype))
        return m.a(x) + m.mean

    def strict(m, x):
        assert_small(x)
        m.mean = m.mean.to(x.device)
        return m.a.to(x.device)(x) + m.mean

    return {f.__name__: f for f in (moved, whole, copied, data, buffer, strict)}


@pytest.mark.parametrize("name", ["moved", "whole", "copied", "data", "buffer", "strict"])
def test_writes_of_what_is_there_are_none(torch, name):
    module = two(torch, own_writes(torch)[name])
    with warnings.catch_warnings():
        warnings.simplefilter("error", frit.FritWarning)
        warnings.filterwarnings("ignore", r"\[W061\]")
        plan, _, _, state, _ = compared = trained(torch, module, {"x": torch.randn(8, 4)})
    if "mean" not in state:
        compared[4].pop("mean")
    check(*compared[1:])
    assert {r["parameter"] for r in plan.units if r["kind"] == "trainable"} >= {"a.weight", "a.bias"}


def test_writes_of_other_values_are_refused(torch):
    def converted(m, x):
        return m.a.to(torch.float64)(x.double()).float()

    def rounded(m, x):
        return m.a.half().float()(x)

    def data(m, x):
        m.a.weight.data = m.a.weight.data.clamp(-0.1, 0.1)
        return m.a(x)

    refusals = {converted: "converts the parameters of `a`", rounded: "converts", data: "writes .*`a.weight`"}
    for forward, message in refusals.items():
        with pytest.raises(frit.FritError, match=rf"\[E032\] `forward` {message}") as refused:
            frit.compile(two(torch, forward), torch.randn(8, 4), loss="output")
        assert refused.value.remedy


def conditions(torch):
    """What conditions depend on, with what is said of it."""
    functional = torch.nn.functional
    random, constant = "a random number", "the values of a constant"
    table, tables = torch.ones(3), [torch.ones(3)]
    return [
        (lambda m, x: torch.rand(1).item() <= 0.5, random),
        (lambda m, x: torch.rand([]) < m.b.weight.abs().max(), random),
        (lambda m, x: torch.empty(1).uniform_(0, 1) < 0.5, random),
        (lambda m, x: functional.dropout(torch.ones(1)).item() > 1, random),
        (lambda m, x: torch.distributions.Bernoulli(0.5).sample(), random),
        (lambda m, x: m.mean.any(), "the values of the buffer `mean`"),
        (lambda m, x: not m.mean.sum().item() > 0, "the values of the buffer `mean`"),
        (lambda m, x: (m.a.weight * torch.ones(4)).norm() > 1, "the values of the parameter `a.weight`"),
        (lambda m, x: m.a.table.sum() > 0, "the values of the constant `a.table`"),
        (lambda m, x: table.sum() > tables[0].sum(), constant),
        (lambda m, x: (torch.diff(torch.linspace(0, 1, 5)) > 0).all(), constant),
        (lambda m, x: torch.ones(4)[x[0] > 0].shape[0] > 2, "how many elements a mask selects"),
        (lambda m, x: x.max() > 1, "data"),
        (lambda m, x: (x > 0).sum().item() > 1, "data"),
        (lambda m, x: range(int(x[0, 0])), "data"),
        (lambda m, x: torch.rand(4).max() > x.max(), "data"),
        (lambda m, x: torch.zeros(x.shape[0], x[0].max()).any(), "a size depends on data"),
    ]


@pytest.mark.parametrize("case", range(17))
def test_what_a_condition_depends_on_is_said(torch, case):
    condition, what = conditions(torch)[case]
    assert len(conditions(torch)) == 17

    def forward(m, x):
        return m.a(x) if condition(m, x) else m.b(x)

    module = two(torch, forward)
    module.a.table = torch.ones(3)
    with pytest.raises(frit.FritError, match=rf"\[E010\] .*{what}") as refused:
        frit.compile(module, torch.randn(8, 4), loss="output")
    assert "test_program.py:" in str(refused.value) and len(str(refused.value)) < 400
    remedy = {"a random number": "layerdrop", "the values": "out of `forward`", "a size dep": "mask", "data": "torch.where"}
    assert all(text in refused.value.remedy for start, text in remedy.items() if what.startswith(start))


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
        torch._assert_async(torch._is_all_true(h < 1e9))
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


def archived(torch, form="dict"):
    """A model that ONNX has no form of, with a convolution, normalizations, tied and frozen parameters, a buffer and a region
    without gradients."""
    nn, functional = torch.nn, torch.nn.functional

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv1d(4, 6, 3, padding=1, bias=False), nn.BatchNorm1d(6)
            self.table, self.head = nn.Embedding(9, 6), nn.Linear(6, 9, bias=False)
            self.head.weight = self.table.weight
            self.mix, self.last = nn.Linear(6, 6), nn.BatchNorm1d(6)
            self.place = nn.Embedding(9, 6, padding_idx=2)
            self.register_buffer("shift", torch.randn(6))
            self.mix.bias.requires_grad = False

        def forward(self, x, ids, y):
            h = self.norm(self.conv(x)).relu().amax(-1) + self.shift
            h = torch.sort(self.mix(h) + self.table(ids) + self.place(ids), dim=-1, stable=True)[0]
            with torch.no_grad():
                teacher = self.head(h).softmax(-1)
            h = self.last(h)
            logits = self.head(h)
            loss = functional.cross_entropy(logits, y) + functional.cross_entropy(logits, teacher)
            return {"hidden": h, "loss": loss, "logits": logits, "x": x, "cache": object()} if form == "dict" else logits

    torch.manual_seed(0)
    inputs = {"x": torch.randn(8, 4, 5), "ids": torch.randint(0, 9, (8,)), "y": torch.randint(0, 9, (8,))}
    return Model(), inputs


# Ranks, micro-steps, how batches are normalized.
@pytest.mark.parametrize("ranks, accumulation, norm", [(1, 1, "batch"), (2, 1, "sync"), (2, 2, "eval"), (1, 1, "mixed")])
def test_modules_without_an_onnx_form_train_as_torch_trains_them(torch, ranks, accumulation, norm, tmp_path):
    module, inputs = archived(torch)
    if norm == "eval":
        module.norm.eval(), module.last.eval()
    elif norm == "mixed":
        module.last.eval()
    options = {"model": {"batch_norm": "sync"}} if norm == "sync" else {}
    before = copy.deepcopy(module.state_dict())
    plan, *compared = trained(torch, module, inputs, ranks=ranks, accumulation=accumulation, **options)
    assert is_archived(plan) and not (Path(plan._holder.path) / "model.onnx").exists()
    check(*compared, rel=1e-5)
    assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items())
    kinds = {row["parameter"]: row["kind"] for row in plan.units}
    assert kinds["mix.bias"] == "frozen" and kinds["mix.weight"] == kinds["table.weight"] == "trainable"
    assert "shift" not in kinds and torch.equal(compared[2]["mix.bias"], before["mix.bias"])
    # What was trained loads back, is evaluated as torch does, and is exported.
    module.load_state_dict(compared[2])
    examples = list(inputs.values())
    with plan.trainer() as trainer, torch.no_grad():
        trainer.load_state_dict(module.state_dict())
        names = [i["name"] for i in plan.inputs]
        assert sorted(names) == ["ids", "x", "y"]
        evaluated = trainer.evaluate(inputs)["loss"]
        module.eval()
        parts = [x.split(8 // ranks) for x in examples]
        expected = np.mean([module(*part)["loss"].item() for part in zip(*parts)])
        assert evaluated == pytest.approx(expected, rel=1e-5)
        trainer.export(tmp_path / "model.onnx")
        again = frit.compile(tmp_path / "model.onnx", loss={"kind": "output", "logits": "loss"}, precision="fp32")
    assert set(again.parameters) >= {"conv.weight", "mix.bias", "table.weight"}
    with again.trainer() as trainer:
        part = {k: v[: again.batch] for k, v in inputs.items()}
        assert trainer.evaluate(part)["loss"] == pytest.approx(module(*part.values())["loss"].item(), rel=1e-5)


def test_an_archive_is_as_good_as_a_file(torch, tmp_path):
    module, inputs = archived(torch, "logits")
    options = {"loss": "cross_entropy", "precision": "bf16", "params": {"frozen": ["conv.weight"]}}
    plan = frit.compile(module, inputs, output=tmp_path / "plan", **options)
    kinds = {row["parameter"]: row["kind"] for row in plan.units}
    assert kinds["conv.weight"] == kinds["mix.bias"] == "frozen" and "y" not in [i["name"] for i in plan.inputs[:2]]
    assert plan.verify()["certificate"]
    with plan.trainer(checkpoint=tmp_path / "checkpoint") as trainer:
        batch = {i["name"]: inputs.get(i["name"], inputs["y"]) for i in plan.inputs}
        found = [trainer.step(batch)["loss"] for _ in range(4)]
    loaded = frit.load(tmp_path / "plan")
    with loaded.trainer() as trainer:
        assert [trainer.step(batch)["loss"] for _ in range(4)] == found
        trainer.export(tmp_path / "model.onnx")


class Sorted:
    """What ONNX has no form of, as a part of modules."""

    @staticmethod
    def of(torch, x):
        return torch.sort(x, dim=-1, stable=True)[0]


def test_what_an_archive_would_lose_is_refused(torch):
    class Round(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return torch.round(x)

        @staticmethod
        def backward(ctx, dy):
            return dy

    def function(m, x):
        return Sorted.of(torch, Round.apply(m.a(x)))

    def buffer(m, x):
        with torch.no_grad():
            m.mean.mul_(0.9).add_(x.mean(0))
        return Sorted.of(torch, m.a(x)) - m.mean

    def frequency(m, x):
        ids = torch.arange(8) % 4
        return torch.nn.functional.embedding(ids, m.a.weight, scale_grad_by_freq=True)

    x = torch.randn(8, 4)
    for forward, code, message in [
        (function, "E010", "there is no ONNX form of aten.sort.stable"),
        (buffer, "E032", "writes the buffer `mean`"),
        (frequency, "E032", "scale_grad_by_freq"),
    ]:
        with pytest.raises(frit.FritError, match=message) as refused:
            frit.compile(two(torch, forward), x, loss="output")
        assert refused.value.code == code and refused.value.remedy
    with pytest.warns(frit.FritWarning, match="writes `mean`, and a plan does not"):
        plan = frit.compile(two(torch, lambda m, x: (m.mean.add_(1), Sorted.of(torch, m.a(x)))[1]), x, loss="output")
    assert is_archived(plan)


def test_dropout_and_unread_statistics_of_archives(torch):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.norm = torch.nn.Linear(4, 64), torch.nn.BatchNorm1d(64)

        def forward(self, x):
            h = self.a(x)
            self.norm(h * 2)
            return {"loss": Sorted.of(torch, torch.dropout(self.norm(h), 0.5, True)).square().mean()}

    x = torch.randn(8, 4)
    torch.manual_seed(0)
    module = Model().eval()
    plan = frit.compile(module, x, loss="output", precision="fp32", optimizer=SGD)
    with plan.trainer() as trainer:
        first, second = [trainer.step([x])["loss"] for _ in range(2)]
        state = trainer.state_dict()
    assert is_archived(plan) and not module.training and abs(first - second) > 1e-3 and 1 < first < 4
    reference = copy.deepcopy(module).train()
    reference.a.weight.data, reference.a.bias.data = state["a.weight"], state["a.bias"]
    # The statistics of both calls, as far as the parameters barely move.
    for _ in range(2):
        reference(x)
    assert np.allclose(state["norm.running_var"], reference.norm.running_var, rtol=0.2)


def test_why_a_module_has_no_plan(torch):
    class Unknown(torch.nn.Module):
        def __init__(self, forward):
            super().__init__()
            self.layer, self.own = torch.nn.Linear(4, 4), forward

        def forward(self, x):
            return {"loss": self.own(self.layer(x))}

    def refused(forward):
        with pytest.raises(frit.FritError) as error:
            frit.compile(Unknown(forward), torch.randn(8, 4), loss="output")
        return error.value

    error = refused(lambda h: torch.mode(h, -1).values.mean())
    assert error.code == "E031" and "aten.mode" in str(error) and "exporting.md" in error.remedy
    assert error.notes[-1] == "as ONNX: [E010] torch cannot write the module as ONNX: there is no ONNX form of aten.mode.default"
    error = refused(lambda h: torch.cat([h[h > 0], h[0]]).mean())
    assert error.code == "E034" and "Concat" in str(error)
    error = refused(lambda h: h.mean() if h.sum() > 0 else -h.mean())
    assert error.code == "E010" and "depends on data" in str(error) and "test_program.py:" in str(error)
    assert "<class" not in str(error) and len(str(error)) < 400
    table = torch.nn.Sequential(torch.nn.Embedding(6, 4, max_norm=1.0))
    with pytest.raises(frit.FritError, match=r"\[E032\] the embedding `0` has max_norm"):
        frit.compile(table, torch.zeros(2, 3, dtype=torch.int64), loss="mse")


def test_experts_of_transformers_are_asked_for_batches(torch, request):
    try:
        import transformers
    except ImportError:
        skip_without("torch", request, "needs transformers")
    config = transformers.MixtralConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=2, num_experts_per_tok=1, max_position_embeddings=16,
    )  # fmt: skip
    module, ids = transformers.MixtralForCausalLM(config), torch.randint(0, 32, (2, 8))
    with pytest.raises(frit.FritError, match="grouped_mm") as refused:
        frit.compile(module, {"input_ids": ids}, loss="cross_entropy")
    assert "set_experts_implementation" in refused.value.remedy
    module.set_experts_implementation("batched_mm")
    assert frit.compile(module, {"input_ids": ids}, loss="cross_entropy").units


def attention(torch, kind):
    """Attention of two sequences, of which the second has two places of padding that neither see nor are seen."""

    class Attention(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v = (torch.nn.Linear(8, 8) for _ in range(3))
            self.register_buffer("weights", torch.tensor([0.3, -1.2, 0.8, 2.0]))

        def forward(self, x, places):
            q, k, v = (m(x).view(2, 6, 2, 4).transpose(1, 2) for m in (self.q, self.k, self.v))
            kept = (places[:, None, :, None] * places[:, None, None, :]).bool()
            if kind == "bool":
                y = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=kept)
            else:
                scores = q @ k.transpose(-1, -2) / 2
                if kind == "added":
                    scores = scores + torch.where(kept, 0.0, -1e9)
                else:
                    scores = scores.masked_fill(~kept, torch.finfo(x.dtype).min if kind == "least" else -1e9)
                y = scores.softmax(-1) @ v
            return {"loss": (y * self.weights).tanh().pow(2).mean()}

    torch.manual_seed(3)
    places = torch.ones(2, 6)
    places[1, 4:] = 0
    return Attention(), {"x": torch.randn(2, 6, 8), "places": places}


@pytest.mark.parametrize("kind", ["filled", "least", "added", "bool"])
def test_queries_that_see_no_key_have_the_gradients_of_torch(torch, kind):
    module, inputs = attention(torch, kind)
    plan, *found = trained(torch, module, inputs)
    assert not is_archived(plan)
    check(*found)


def transformers(torch):
    """Modules of torch's transformer, by how their masks are given: of 5 tokens, the last ones of which may be padding."""
    nn = torch.nn
    sizes = {"d_model": 8, "nhead": 2, "dim_feedforward": 16, "dropout": 0.0, "batch_first": True}
    causal = nn.Transformer.generate_square_subsequent_mask

    class Encoder(nn.Module):
        def __init__(self, call):
            super().__init__()
            self.inner = nn.TransformerEncoder(nn.TransformerEncoderLayer(**sizes), 2)
            self.call = call
            self.register_buffer("mask", causal(5))

        def forward(self, x, padded):
            return {"loss": self.call(self, x, padded).square().mean()}

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Transformer(num_encoder_layers=1, num_decoder_layers=1, **sizes)

        def forward(self, x, padded):
            y = self.inner(x, x.flip(1), tgt_mask=causal(5), src_key_padding_mask=padded, memory_key_padding_mask=padded)
            return {"loss": y.square().mean()}

    return {
        "made": lambda: Encoder(lambda m, x, padded: m.inner(x, mask=causal(x.shape[1]))),
        "kept": lambda: Encoder(lambda m, x, padded: m.inner(x, mask=m.mask)),
        "flagged": lambda: Encoder(lambda m, x, padded: m.inner(x, mask=m.mask, is_causal=True)),
        "padded": lambda: Encoder(lambda m, x, padded: m.inner(x, mask=m.mask > 0, src_key_padding_mask=padded)),
        "both": Both,
    }


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", ["made", "kept", "flagged", "padded", "both"])
@pytest.mark.parametrize("ranks, accumulation", [(1, 1), (2, 2)])
def test_masks_of_transformers_are_no_conditions(torch, name, ranks, accumulation):
    torch.manual_seed(0)
    module, batch = transformers(torch)[name](), 2 * ranks * accumulation
    padded = torch.arange(5) >= torch.randint(3, 6, (batch, 1))
    inputs = {"x": torch.randn(batch, 5, 8), "padded": padded}
    plan, *compared = trained(torch, module, inputs, ranks=ranks, accumulation=accumulation)
    check(*compared, rel=1e-5)
    assert not is_archived(plan)


def test_parameters_may_have_the_names_of_operations(torch):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.t, self.add, self.linear = torch.nn.Parameter(torch.ones(())), torch.nn.Parameter(torch.ones(4)), torch.nn.Linear(4, 4)

        def forward(self, x):
            return {"loss": ((self.linear(x) + self.add).t() * self.t.exp() + 1).square().mean()}

    torch.manual_seed(0)
    plan, *compared = trained(torch, Model(), {"x": torch.randn(6, 4)})
    check(*compared)
    assert not is_archived(plan)


def test_archives_of_modules_that_write_in_place(torch):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a = torch.nn.Linear(4, 5)

        def forward(self, x):
            # There is no ONNX form of the running product.
            seen = torch.cumprod(torch.sigmoid(self.a(x)), -1).roll(1, -1)
            seen[..., 0] = 1.0
            with torch.no_grad():
                still = self.a(x)
            return {"loss": (seen * (self.a(x) - still.detach())).square().mean() + seen.sum() / 10}

    torch.manual_seed(0)
    plan, *compared = trained(torch, Model(), {"x": torch.randn(6, 4)})
    check(*compared)
    assert is_archived(plan)


def test_an_error_that_is_being_handled_is_no_cause(torch):
    class Cumulative(torch.nn.Module):
        def __init__(self, operation):
            super().__init__()
            self.linear, self.operation = torch.nn.Linear(4, 4), operation

        def forward(self, x):
            return self.operation(self.linear(x)).square().mean()

    x = torch.randn(3, 4)
    try:
        frit.compile(Cumulative(torch.linalg.svdvals), x, loss="output")
    except frit.FritError:
        plan = frit.compile(Cumulative(lambda h: h.cumprod(1)), x, loss="output")
    assert plan.inputs
