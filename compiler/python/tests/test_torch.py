"""torch modules: exported, trained as torch does, and loaded back."""

import copy
import dataclasses
import typing
import warnings

import numpy as np
import pytest
from conftest import run

import frit

STEPS = 6


def tied(torch):
    """A language model whose table is also its head, with a buffer, a frozen table and a causal attention."""
    nn = torch.nn

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.qkv, self.proj = nn.LayerNorm(16), nn.Linear(16, 48, bias=False), nn.Linear(16, 16)
            self.register_buffer("mask", torch.tril(torch.ones(8, 8)).bool())

        def forward(self, x):
            q, k, v = self.qkv(self.norm(x)).split(16, -1)
            scores = (q @ k.transpose(-1, -2)) / 4
            scores = scores.masked_fill(~self.mask, float("-inf"))
            return x + self.proj(torch.softmax(scores, -1) @ v)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.wte, self.wpe = nn.Embedding(31, 16), nn.Embedding(8, 16)
            self.h = nn.ModuleList([Block(), Block()])
            self.head = nn.Linear(16, 31, bias=False)
            self.head.weight = self.wte.weight
            self.wpe.weight.requires_grad = False

        def forward(self, ids):
            x = self.wte(ids) + self.wpe(torch.arange(8))
            for block in self.h:
                x = block(x)
            return self.head(x)

    ids = torch.randint(0, 31, (8 * STEPS, 9), generator=torch.Generator().manual_seed(1))
    return Model(), {"ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}


def conv(torch):
    """Convolutions with batch normalization."""
    nn = torch.nn
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(16, 10),
    )  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(8 * STEPS, 3, 16, 16, generator=generator)
    return model, {"input": x, "labels": torch.randint(0, 10, (8 * STEPS,), generator=generator)}


def reference(torch, module, inputs):
    """The losses of torch, and the module that it trained."""
    module = copy.deepcopy(module).train()
    optimizer = torch.optim.AdamW(
        [p for p in module.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.01
    )
    (x, labels), losses = inputs.values(), []
    for xs, ys in zip(x.split(8), labels.split(8)):
        logits = module(xs)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, -2), ys.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses, module


@pytest.mark.parametrize("make", [tied, conv])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_module_trains_as_torch_trains_it(torch, make, ranks):
    # torch normalizes by the batch of all ranks.
    options = {"model": {"batch_norm": "sync"}} if make is conv and ranks == 2 else {}
    torch.manual_seed(0)
    module, inputs = make(torch)
    module.eval()
    name = next(iter(inputs))
    before = {k: v.clone() for k, v in module.state_dict().items()}
    plan = frit.compile(
        module, inputs[name][: 8 // ranks], loss="cross_entropy", precision="fp32", ranks=ranks,
        optimizer={"lr": 1e-2}, **options,
    )  # fmt: skip
    assert not module.training and plan.module is module
    assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items())
    reasons = {row["parameter"]: row["kind"] for row in plan.units}
    assert all(k in before or reasons[k] not in ("trainable", "frozen") for k in reasons), reasons
    assert reasons.get("wpe.weight", "frozen") == "frozen"
    dataset = torch.utils.data.TensorDataset(*(inputs[i["name"]] for i in plan.inputs))
    loader = torch.utils.data.DataLoader(dataset, batch_size=plan.examples_per_step)
    names = [i["name"] for i in plan.inputs]
    with plan.trainer() as trainer:
        losses = [trainer.step(dict(zip(names, batch)))["loss"] for batch in loader]
        state = trainer.state_dict()
        evaluated = trainer.evaluate(dict(zip(names, b)) for b in loader)["loss"]
    expected, trained = reference(torch, module, inputs)
    assert np.allclose(losses, expected, rtol=2e-5), (losses, expected)
    # Numpy and sequences: the same bits.
    assert run(plan, ({k: v.numpy() for k, v in zip(names, batch)} for batch in loader)) == losses
    assert run(plan, loader) == losses
    # And the state loads back, strictly.
    assert list(state) == list(module.state_dict())
    module.load_state_dict(state)
    for key, value in trained.state_dict().items():
        if "num_batches" not in key:
            # Where a gradient is 0 up to rounding, Adam divides rounding by rounding.
            difference = (value.double() - state[key].double()).abs()
            assert difference.mean() < 2e-5 and difference.max() < 2e-3, (key, difference.max())
    with torch.no_grad():
        logits = module.eval()(inputs[name])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, -2), inputs["labels"].flatten())
    assert abs(loss.item() - evaluated) < 1e-4
    with plan.trainer() as trainer:
        trainer.load_state_dict(module.state_dict())
        assert trainer.evaluate(dict(zip(names, b)) for b in loader)["loss"] == evaluated


def test_structures_are_outputs_by_name(torch):
    nn, functional = torch.nn, torch.nn.functional

    class Structured(nn.Module):
        def __init__(self, form):
            super().__init__()
            self.layer, self.form = nn.Linear(4, 3), form

        def forward(self, x, labels=None):
            logits = self.layer(x)
            loss = functional.cross_entropy(logits, labels) if labels is not None else None
            return self.form(logits, loss, x)

    class Named(typing.NamedTuple):
        loss: typing.Any
        logits: typing.Any

    @dataclasses.dataclass
    class Data:
        logits: typing.Any
        cache: typing.Any

    x, labels = torch.randn(5, 4), torch.tensor([0, 2, 1, 1, 0])
    batch = {"x": x, "labels": labels}
    forms = [
        lambda logits, loss, x: {"loss": loss, "logits": logits, "again": logits, "x": x, "cache": object()},
        lambda logits, loss, x: Named(loss, logits),
        lambda logits, loss, x: Data(logits, {"keys": [x]}),
        lambda logits, loss, x: logits,
    ]
    found = []
    for form in forms:
        module = Structured(form)
        module.load_state_dict({"layer.weight": torch.arange(12.0).view(3, 4) / 12, "layer.bias": torch.zeros(3)})
        plan = frit.compile(module, x, loss="cross_entropy", precision="fp32")
        found.append(run(plan, [batch] * 3))
        assert "forward" not in vars(module) and form(1, 2, 3) is not None
        assert list(plan.trainer().state_dict()) == ["layer.weight", "layer.bias"]
    for form in forms[:2]:
        module.form = form
        for loss in ("output", {"kind": "output"}, {"kind": "output", "logits": "loss"}):
            plan = frit.compile(module, batch, loss=loss, precision="fp32")
            assert {i["name"] for i in plan.inputs} == {"x", "labels"}
            found.append(run(plan, [batch] * 3))
    expected = functional.cross_entropy(module.layer(x), labels).item()
    for losses in found:
        assert abs(losses[0] - expected) < 1e-6 and np.allclose(losses, found[0], rtol=1e-6)
    # A tuple has places for names.
    module.form = lambda logits, loss, x: (x, None, logits)
    plan = frit.compile(module, x, loss={"kind": "cross_entropy", "logits": "output_2"}, precision="fp32")
    assert run(plan, [batch] * 3) == found[0]
    with pytest.raises(frit.FritError, match="output_2") as refused:
        frit.compile(module, x, loss="cross_entropy")
    assert "loss.logits" in refused.value.remedy


def test_saturated_sigmoids_are_exported_without_overflow(torch):
    functional = torch.nn.functional

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.full((1,), 200.0))

        def forward(self, x, targets):
            logits = x * self.scale
            loss = functional.binary_cross_entropy_with_logits(logits, targets)
            return {"loss": loss - functional.logsigmoid(logits).mean()}

    module, batch = Model(), {"x": torch.tensor([[-2.0, 3.0], [1.0, -1.0]]), "targets": torch.eye(2)}
    with warnings.catch_warnings():
        warnings.simplefilter("error", frit.FritWarning)
        plan = frit.compile(module, batch, loss="output", precision="fp32", optimizer={"clip_grad_norm": 0.0})
    with plan.trainer() as trainer:
        found = trainer.step(batch)
    loss = module(**batch)["loss"]
    loss.backward()
    assert abs(found["loss"] - loss.item()) < 1e-3 and np.isfinite(found["loss"])
    assert abs(found["grad_norm"] - module.scale.grad.abs().item()) < 1e-4


def losses_of(torch, module, inputs, loss, labels=()):
    """Losses of three steps of SGD here, and by torch."""
    optimizer = {"kind": "sgd", "lr": 0.1, "weight_decay": 0.0, "momentum": 0.0, "clip_grad_norm": 1e9}
    plan = frit.compile(module, inputs, loss=loss, precision="fp32", optimizer=optimizer)
    trainer = plan.trainer()
    found = [trainer.step([*inputs.values(), *labels])["loss"] for _ in range(3)]
    module, expected = copy.deepcopy(module).train(), []
    own = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(3):
        y = module(*inputs.values())
        total = y["loss"] if loss == "output" else torch.nn.functional.mse_loss(y, *labels)
        own.zero_grad()
        total.backward()
        own.step()
        expected.append(total.item())
    return found, expected


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_labels_are_smoothed(torch, weighted, reduction):
    class Smoothed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(6, 5)
            self.register_buffer("weight", torch.rand(5) + 0.5)

        def forward(self, x, y):
            own = dict(weight=self.weight if weighted else None, reduction=reduction, label_smoothing=0.1)
            return {"loss": torch.nn.functional.cross_entropy(self.layer(x).transpose(1, 2), y, **own)}

    torch.manual_seed(0)
    labels = torch.randint(0, 5, (3, 4))
    labels[1, 2] = -100
    found, expected = losses_of(torch, Smoothed(), {"x": torch.randn(3, 4, 6), "y": labels}, "output")
    assert found == pytest.approx(expected, rel=2e-6)


@pytest.mark.parametrize("include_self", [False, True])
@pytest.mark.parametrize("reduce", ["mean", "sum"])
def test_elements_are_scattered_as_torch_does(torch, reduce, include_self):
    class Scattered(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)

        def forward(self, x, segments):
            h = self.layer(x).squeeze(1)  # Nothing to squeeze.
            start = torch.ones(x.shape[0], 5, 4)
            index = segments[..., None].expand_as(h)
            return start.scatter_reduce(1, index, h, reduce, include_self=include_self)

    torch.manual_seed(0)
    inputs = {"x": torch.randn(2, 9, 4), "segments": torch.randint(0, 4, (2, 9))}
    found, expected = losses_of(torch, Scattered(), inputs, "mse", [torch.randn(2, 5, 4)])
    assert found == pytest.approx(expected, rel=2e-6)


@pytest.mark.parametrize("form", ["sum", "mask", "norm", "linear", "constant"])
def test_buffers_beside_parameters_are_themselves(torch, form):
    class Beside(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(4, 4))
            self.scale = torch.nn.Parameter(torch.randn(4))
            self.register_buffer("mask", (torch.rand(4, 4) > 0.5).float())
            self.register_buffer("shift", torch.randn(4))
            self.constant = torch.randn(4)

        def forward(self, x):
            functional = torch.nn.functional
            if form == "sum":
                return x * (self.scale + self.shift)
            if form == "mask":
                return functional.linear(x, self.weight * self.mask, self.scale)
            if form == "norm":
                return functional.layer_norm(x, (4,), self.scale, self.shift)
            if form == "linear":
                return functional.linear(x, self.mask, self.scale)
            return x * (self.scale + self.constant)

    torch.manual_seed(0)
    found, expected = losses_of(torch, Beside(), {"x": torch.randn(8, 4)}, "mse", [torch.randn(8, 4)])
    assert found == pytest.approx(expected, rel=2e-6)


def test_statistics_of_unread_results_are_warned_of(torch):
    class Twice(torch.nn.Module):
        def __init__(self, read):
            super().__init__()
            self.norm, self.read = torch.nn.BatchNorm1d(4), read
            self.out = torch.nn.Linear(4, 4)

        def forward(self, x):
            first = self.norm(x * 2)
            y = self.out(self.norm(x))
            return y + first if self.read else y

    inputs = {"x": torch.randn(8, 4)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        frit.compile(Twice(True), inputs, loss="mse")
    with pytest.warns(UserWarning, match=r"results of 1 batch normalization\(s\)"):
        frit.compile(Twice(False), inputs, loss="mse")


def test_extra_state_of_modules_is_kept(torch):
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 2)

        def forward(self, x):
            return self.layer(x)

        def get_extra_state(self):
            return {"version": 1}

        def set_extra_state(self, state):
            pass

    plan = frit.compile(Net(), torch.randn(3, 4), loss="mse")
    with plan.trainer() as trainer:
        trainer.step((torch.randn(3, 4), torch.randn(3, 2)))
        state = trainer.state_dict()
    assert list(state) == list(plan.module.state_dict())
    assert state["_extra_state"] == {"version": 1}


def test_state_that_no_file_can_carry_is_refused(torch):
    class Counted(torch.nn.Module):
        def __init__(self, read):
            super().__init__()
            self.layer, self.norm, self.read = torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), read
            self.register_buffer("steps", torch.zeros(()))

        def forward(self, x):
            self.steps += 1
            y = self.norm(self.layer(x))
            return y / self.steps if self.read else y

    inputs, labels = {"x": torch.randn(8, 4)}, [torch.randn(8, 4)]
    with pytest.raises(frit.FritError, match=r"\[E032\] `forward` writes the buffer `steps`"):
        frit.compile(Counted(True), inputs, loss="mse")
    found, expected = losses_of(torch, Counted(False), inputs, "mse", labels)
    assert found == pytest.approx(expected, rel=2e-6)
    scaled = torch.nn.Embedding(6, 4, scale_grad_by_freq=True)
    with pytest.raises(frit.FritError, match=r"\[E032\] the embedding `0` has scale_grad_by_freq"):
        frit.compile(torch.nn.Sequential(scaled), torch.zeros(2, 3, dtype=torch.int64), loss="mse")


def test_attention_of_any_layout_is_exported(torch):
    class Attention(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.bias = torch.nn.Linear(16, 48), torch.nn.Parameter(torch.zeros(1, 4, 6, 6))

        def forward(self, x):
            q, k, v = (t.view(*x.shape[:2], 4, 4).transpose(1, 2) for t in self.qkv(x).split(16, -1))
            y = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=self.bias)
            return y.transpose(1, 2).reshape(x.shape)

    module, x, y = Attention(), torch.randn(2, 6, 16), torch.randn(2, 6, 16)
    plan = frit.compile(module, x, loss="mse", precision="fp32")
    loss = run(plan, [[x, y] if plan.inputs[0]["name"] == "x" else [y, x]])[0]
    assert abs(loss - torch.nn.functional.mse_loss(module(x), y).item()) < 1e-5


def test_half_precision_tensors_are_taken(torch):
    module = torch.nn.Linear(4, 3)
    plan = frit.compile(module, (torch.zeros(2, 4),), loss="mse", precision=torch.bfloat16)
    x = torch.randn(2, 4)
    names = [i["name"] for i in plan.inputs]
    for dtype in (torch.bfloat16, torch.float16):
        low = x.to(dtype).requires_grad_()
        wide = [run(plan, [dict(zip(names, (v, torch.zeros(2, 3))))]) for v in (low, low.float())]
        assert wide[0] == wide[1]


def test_what_torch_cannot_export_is_said(torch, capfd):
    class Branches(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)

        def forward(self, x):
            print("forward")
            return self.layer(x) if x.sum() > 0 else x

    with pytest.raises(frit.FritError, match="torch cannot export") as refused:
        frit.compile(Branches(), torch.zeros(2, 4), loss="mse")
    # What the module prints, and nothing that torch does.
    printed, complained = capfd.readouterr()
    assert set(printed.split()) == {"forward"} and not complained
    assert refused.value.code == "E010" and "torch.where" in refused.value.remedy
    assert "\x1b" not in str(refused.value) and "Next steps" not in str(refused.value)
    assert refused.value.__cause__ is not None
    with pytest.raises(frit.FritError, match="needs example inputs"):
        frit.compile(torch.nn.Linear(2, 2), loss="mse")


def keeping(torch):
    """Forwards that keep a table in the module, by how."""

    def table(x):
        return torch.arange(x.shape[1]) * 0.1

    def buffer(m, x):
        if m.table is None:
            m.register_buffer("table", table(x))
        return m.table

    def assigned(m, x):
        if m.table is None:
            m.table = table(x)
        return m.table

    def new(m, x):
        m.part.other = table(x)
        m.part.register_buffer("another", table(x), persistent=False)
        m.count += 1
        return m.part.other + m.part.another

    def parameter(m, x):
        m.part = torch.nn.Linear(4, 4)
        m.scale = torch.nn.Parameter(table(x))
        return m.scale

    def contained(m, x):
        m.tables.setdefault(x.shape[1], table(x))
        m.lists[0].append(table(x))
        return m.tables[x.shape[1]] + m.lists[0][-1]

    def failing(m, x):
        assigned(m, x), contained(m, x)
        return m.table if x.sum() > 0 else x

    return {f.__name__: f for f in (buffer, assigned, new, parameter, contained, failing)}


def contents(value):
    """What a module holds, by identity."""
    value = vars(value) if hasattr(value, "_parameters") else value
    if isinstance(value, dict):
        return {name: contents(part) for name, part in value.items()}
    return [contents(part) for part in value] if isinstance(value, (list, tuple)) else id(value)


@pytest.mark.filterwarnings("ignore:The tensor attribute")
@pytest.mark.parametrize("archive", [False, True])
@pytest.mark.parametrize("name", ["buffer", "assigned", "new", "parameter", "contained", "failing"])
def test_a_module_keeps_nothing_of_its_export(torch, name, archive):
    class Keeping(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.part, self.count, self.tables, self.lists = torch.nn.Linear(4, 4), torch.nn.Module(), 0, {}, ([],)
            self.register_buffer("table", None)

        def forward(self, x):
            y = self.layer(x)
            # There is no ONNX form of the stable order.
            return (torch.sort(y, dim=-1, stable=True)[0] if archive else y) + keeping(torch)[name](self, x)

    torch.manual_seed(0)
    module, x, y = Keeping(), torch.randn(3, 4), torch.randn(3, 4)
    before = contents(module)
    for _ in range(2):
        if name == "failing":
            with pytest.raises(frit.FritError, match="depends on data"):
                frit.compile(module, x, loss="mse")
        else:
            plan = frit.compile(module, x, loss="mse", precision="fp32")
            expected = torch.nn.functional.mse_loss(copy.deepcopy(module)(x), y).item()
            assert run(plan, [[x, y]])[0] == pytest.approx(expected, rel=1e-6)
        assert contents(module) == before


def test_batches_may_have_what_the_module_does_not_use(torch):
    class Unused(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)

        def forward(self, *inputs):
            return self.layer(inputs[0]) - 2 * inputs[2]

    torch.manual_seed(0)
    x, unused, y, labels = (torch.randn(3, 4) for _ in range(4))
    plan = frit.compile(Unused(), (x, unused, y), loss="mse", precision="fp32")
    assert [i["name"] for i in plan.inputs] == ["inputs_0", "inputs_2", "labels"]
    losses = [run(plan, [batch])[0] for batch in ([x, y, labels], [x, unused, y, labels], (x, None, y, labels))]
    assert losses[0] == losses[1] == losses[2]
    with plan.trainer() as trainer:
        assert trainer.evaluate([[x, y, labels]])["loss"] == trainer.evaluate([[x, unused, y, labels]])["loss"]
        with pytest.raises(frit.FritError, match="2 values.*the module does not use inputs_1") as refused:
            trainer.step([x, y])
    assert refused.value.code == "E100"
