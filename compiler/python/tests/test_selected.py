"""What a mask selects: its size depends on data, and a plan's sizes are fixed."""

import frit
import numpy as np
import pytest
from test_program import SGD, STEPS, check, is_archived, trained


def functions(torch):
    """Functions of activations [12, 5], inputs [12, 8] and labels [12], by name."""
    functional = torch.nn.functional

    def written(z, x, y):
        out, mask = z * 0.5, y > 1
        out[mask] = torch.tanh(z[mask])
        out[y == 2] += z[y == 2].sin()
        return out.square().mean()

    def hard(z, x, y):
        losses = functional.cross_entropy(z, y, reduction="none")
        return losses[losses > losses.mean()].mean()

    def pooled(z, x, y):
        rows = z[y > 0]
        weights = torch.softmax(rows[:, :1], 0)
        return (weights * rows).sum(0).square().sum() + torch.logsumexp(rows, 0).sum()

    def shares(z, x, y):
        shares = torch.softmax(z[y > 1], 0)
        n = shares.shape[0]
        return shares.sqrt().sum() + (z[y > 1] / (n - torch.arange(n))[:, None]).square().sum() + z[y > 1][y[:2] - 2].mean()

    def extremes(z, x, y):
        rows = z[y > 1]
        return rows.max(0).values.sum() + rows.amin(0).sum() + rows[rows[:, 0].argmax()].sum() + rows[0].sum()

    def counted(z, x, y):
        rows = z[y > 1]
        return rows.sum() / rows.shape[0] + rows.std() + rows.norm()

    def numbered(z, x, y):
        logs, labels = functional.log_softmax(z[y > 0], -1), y[y > 0]
        return -logs[torch.arange(logs.shape[0]), labels].mean() - logs.gather(1, labels[:, None]).mean()

    def gated(z, x, y):
        values, gates = x[y > 0].chunk(2, -1)
        return (values * torch.sigmoid(gates + z[y > 0][:, :4])).square().mean()

    def again(z, x, y):
        with torch.no_grad():
            target = torch.tanh(z[y > 1])
        variance = x[y > 1][:, :5].square() + 0.5
        return functional.mse_loss(z[y > 1], target) + functional.gaussian_nll_loss(z[y > 1], target, variance)

    def images(z, x, y):
        kernels = z[:5, :4].reshape(5, 1, 2, 2)
        found = functional.conv2d(x[y > 1].reshape(-1, 1, 2, 4), kernels, padding=1)
        return functional.avg_pool2d(found, 2).square().mean()

    def copied(z, x, y):
        rows = z[y > 1]
        out = torch.zeros_like(rows)
        out.copy_(z[y > 1])
        out.data = out.data + 1
        return (out.copy_(rows.to(rows.dtype)) * rows).square().mean()

    def joined(z, x, y):
        labels = y.reshape(3, 4)
        mask = labels != 0
        return functional.cross_entropy(z.reshape(3, 4, 5)[mask].view(-1, 5), labels[mask].view(-1), label_smoothing=0.1)

    def spread(z, x, y):
        rows, classes = z[y > 1], y[y > 1]
        at = torch.where(y > 1)[0]
        sums = torch.zeros(5, 5).scatter_add(0, classes[:, None].expand(-1, 5), rows)
        sums = sums + torch.zeros(12, 5).index_add(0, at, rows.cos())[:5]
        return (sums + z.index_copy(0, at, rows.cos())[:5]).square().mean()

    return {
        "cross_entropy": lambda z, x, y: functional.cross_entropy(z[y > 0], y[y > 0]),
        "elements": lambda z, x, y: z[z > 0.3].log().mean() + torch.masked_select(z, z < -0.2).neg().sqrt().mean(),
        "two": lambda z, x, y: (z[y > 1].mean(0) - z[y <= 1].mean(0)).square().sum(),
        "coordinates": lambda z, x, y: z.index_select(0, (y > 1).nonzero().squeeze(-1)).abs().mean(),
        "products": lambda z, x, y: torch.einsum("nd,ne->de", z[y > 1], x[y > 1]).square().mean(),
        "similar": lambda z, x, y: functional.cosine_similarity(z[y > 0], x[y > 0][:, :5]).mean(),
        "sums": lambda z, x, y: z[y > 1].cumsum(0).square().mean(),
        "written": written,
        "hard": hard,
        "pooled": pooled,
        "shares": shares,
        "extremes": extremes,
        "counted": counted,
        "numbered": numbered,
        "again": again,
        "gated": gated,
        "images": images,
        "copied": copied,
        "joined": joined,
        "spread": spread,
    }


NAMES = "cross_entropy elements two coordinates products similar sums written hard pooled shares extremes counted numbered"
NAMES += " again gated images copied joined spread"


def model(torch, function):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a = torch.nn.Linear(8, 5)

        def forward(self, x, y):
            return {"loss": function(self.a(x), x, y)}

    torch.manual_seed(1)
    inputs = {"x": torch.randn(12, 8), "y": torch.tensor([0, 1, 2, 3, 4, 0, 2, 2, 1, 3, 0, 1])}
    return Model(), inputs


@pytest.mark.parametrize("name", NAMES.split())
def test_what_a_mask_selects_is_computed_as_torch_computes_it(torch, name):
    plan, *compared = trained(torch, *model(torch, functions(torch)[name]))
    check(*compared, rel=1e-5)
    assert not is_archived(plan)


@pytest.mark.parametrize("name", "two coordinates written hard numbered".split())
def test_archives_select_as_onnx_files_do(torch, tmp_path, name):
    module, inputs = model(torch, functions(torch)[name])
    torch.export.save(torch.export.export(module, (), inputs), tmp_path / "model.pt2")
    losses = []
    for given in [(module, inputs), (str(tmp_path / "model.pt2"),)]:
        with frit.compile(*given, loss="output", precision="fp32", optimizer=SGD).trainer() as trainer:
            losses.append([trainer.step(inputs)["loss"] for _ in range(STEPS)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def experts(torch, how):
    """A layer of experts, each of which computes what a router sends to it."""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.router = torch.nn.Linear(8, 4)
            of = torch.nn.Sequential
            parts = [of(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8)) for _ in range(4)]
            self.experts = torch.nn.ModuleList(parts)

        def forward(self, x):
            weights, chosen = torch.topk(torch.softmax(self.router(x), -1), 2)
            out = torch.zeros_like(x)
            for i, expert in enumerate(self.experts):
                if how == "where":
                    rows, places = torch.where(chosen == i)
                    out.index_add_(0, rows, expert(x[rows]) * weights[rows, places, None])
                else:
                    mask, own = (chosen == i).any(-1), (weights * (chosen == i)).sum(-1)
                    out[mask] += expert(x[mask]) * own[mask][:, None]
            return {"loss": (out - x).square().mean()}

    return Model()


CROSSED = [
    ("where", 1, 1, {}),
    ("mask", 1, 1, {"memory.recompute": "unit"}),
    ("where", 2, 2, {"sharding.strategy": "shard_grad_op"}),
    ("mask", 4, 1, {}),
    ("where", 1, 3, {"precision.loss_scale": "dynamic"}),
    ("mask", 2, 1, {"memory.offload": "optimizer", "sharding.strategy": "no_shard"}),
]


@pytest.mark.parametrize("how, ranks, accumulation, options", CROSSED)
def test_experts_train_as_in_torch_whatever_they_are_crossed_with(torch, how, ranks, accumulation, options):
    torch.manual_seed(2)
    module, inputs = experts(torch, how), {"x": torch.randn(24, 8)}
    _, *compared = trained(torch, module, inputs, ranks=ranks, accumulation=accumulation, **options)
    check(*compared, rel=1e-5)


def test_a_step_in_which_nothing_is_selected_changes_nothing(torch):
    module, inputs = model(torch, lambda z, x, y: (z[y > 1] * 3).sum() / 12)
    with frit.compile(module, inputs, loss="output", precision="fp32", optimizer=SGD).trainer() as trainer:
        before = trainer.state_dict()
        found = trainer.step({**inputs, "y": torch.zeros(12, dtype=torch.int64)})
        assert found["loss"] == 0.0
        after = trainer.state_dict()
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_a_step_in_which_nothing_is_selected_has_finite_gradients(torch):
    module, inputs = model(torch, lambda z, x, y: z[z > 90].sqrt().sum() + z.square().mean() + (x[y - 9 >= 0, :5] * z[y[y - 9 >= 0]]).sum())
    _, *compared = trained(torch, module, inputs)
    check(*compared, rel=1e-5)


def test_a_condition_on_how_much_is_selected_is_refused(torch):
    def guarded(z, x, y):
        rows = z[y > 7]
        return z.mean() if rows.shape[0] == 0 else rows.mean()

    with pytest.raises(frit.FritError, match="how many elements a mask selects") as refused:
        frit.compile(*model(torch, guarded), loss="output")
    assert refused.value.code == "E010" and "test_selected.py" in str(refused.value)


def test_groups_of_what_is_selected_are_refused(torch):
    with pytest.raises(frit.FritError) as refused:
        frit.compile(*model(torch, lambda z, x, y: z[y > 1].reshape(2, -1, 5).mean(1).square().sum()), loss="output")
    assert refused.value.code == "E034"


def test_functions_with_gradients_of_their_own_are_not_given_what_is_selected(torch):
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a):
            ctx.save_for_backward(a)
            return a * a

        @staticmethod
        def backward(ctx, dy):
            return 2 * dy * ctx.saved_tensors[0]

    with pytest.raises(frit.FritError, match="Square is given tensors of unknown sizes") as refused:
        frit.compile(*model(torch, lambda z, x, y: Square.apply(z[y > 1]).mean()), loss="output")
    assert refused.value.code == "E062"


def test_what_returns_what_is_selected_is_refused(torch):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a = torch.nn.Linear(8, 5)

        def forward(self, x, y):
            return {"rows": self.a(x)[y > 1]}

    _, inputs = model(torch, None)
    with pytest.raises(frit.FritError, match="size that depends on data") as refused:
        frit.compile(Model(), inputs, loss="none")
    assert refused.value.code == "E034"
