"""Operators and losses that torch's exporter cannot write, beside torch."""

import pytest
from test_program import check, is_archived, trained

import frit


def operators(torch):
    """Functions of [8, 6] activations between -2 and 2."""
    functional = torch.nn.functional
    steps = torch.linspace(-1, 1, 5)
    rows = torch.tensor([3, 0, 0, 2, 2, 2, 0, 3])

    def gamma(scale, shift):
        return lambda x: (torch.lgamma(scale * x + shift) + torch.digamma(scale * x + shift) * 0.1)

    def pooled(axes, size):
        def pool(x):
            shape = (2, 2, 12) if axes == 1 else (2, 1, 4, 6) if axes == 2 else (1, 2, 4, 2, 3)
            pool = getattr(functional, f"adaptive_max_pool{axes}d")
            values, places = pool(x.reshape(shape), size, True)
            return values * (1 + places)

        return pool

    def reduced(reduce, include_self):
        return lambda x: torch.ones(4, 6).index_reduce(0, rows, x, reduce, include_self=include_self)

    def bag(mode, **options):
        def of(x):
            ids = torch.tensor([1, 2, 3, 1, 5, 6, 1, 7, 1, 0])
            weights = torch.cat([x[:, 0], x[:2, 1]]) if mode == "sum" else None
            offsets = torch.tensor([0, 3, 3, 6, 7, 10][: 6 if options.get("include_last_offset") else 5])
            return functional.embedding_bag(
                ids, x, offsets, mode=mode, per_sample_weights=weights, padding_idx=1, **options
            )

        return of

    def quantile_like(x):
        smallest, place = x.kthvalue(2, 0, keepdim=True)
        return smallest * (1 + place) + x.median() * x + x.median(1)[0][:, None]

    def extremes(x):
        (high, at_high), (low, at_low) = torch.cummax(x, 1), torch.cummin(x, 0)
        return high * (1 + at_high) + low * (1 + at_low)

    def drawn(x):
        of = torch.distributions
        normal = of.Normal(x, functional.softplus(x.roll(1, 0)))
        rows = of.kl_divergence(normal, of.Normal(0.0, 1.0)) + normal.log_prob(x.roll(1, 1)) + normal.entropy()
        classes = of.Categorical(logits=x)
        rows = rows + (classes.log_prob(torch.arange(8) % 6) + classes.entropy())[:, None]
        rows = rows + of.Bernoulli(logits=x).log_prob((x.detach() > 0).float()) + of.Laplace(x, 2.0).cdf(x.roll(2, 0))
        shares = of.Dirichlet(x.exp() + 1)
        rows = rows + (shares.log_prob(torch.full((6,), 1 / 6)) + of.Independent(of.Cauchy(x, 1.0), 1).log_prob(x.roll(1, 0)))[:, None]
        return rows + of.Beta(x.exp() + 1, x.cos().square() + 2).log_prob(torch.sigmoid(x)) + of.Poisson(x.exp()).log_prob(torch.tensor(3.0))

    def searched(x):
        left = torch.searchsorted(steps, x.detach())
        right = torch.searchsorted(steps.expand(8, 5).contiguous(), x.detach().contiguous(), right=True, out_int32=True)
        return x * (left + 2 * right)

    def averaged(x):
        image = x.reshape(1, 2, 4, 6)
        flat = functional.avg_pool2d(image, 3, 2, 1, ceil_mode=True, divisor_override=2)
        volume = functional.avg_pool3d(image[0].reshape(2, 2, 4, 3), 2, 1, 1, divisor_override=-3)
        return torch.cat([flat.flatten(), volume.flatten()])

    def enlarged(x):
        image = x.reshape(1, 2, 4, 6)
        sized = [
            functional.interpolate(image, scale_factor=1.7, mode="bilinear", align_corners=True),
            functional.interpolate(image, scale_factor=1.3, mode="bicubic", align_corners=True),
            functional.interpolate(image[:, :, None], scale_factor=(2, 1.3, 1.2), mode="trilinear", align_corners=True),
            # A product of 9, which is less in f32.
            functional.interpolate(image.repeat(1, 1, 1, 5)[..., :10], scale_factor=(1, 0.9), mode="nearest"),
        ]
        return torch.cat([y.flatten() for y in sized])

    def counted(x):
        # Two elements, of which f32 counts three.
        return x[:2] * torch.arange(0.1, -7.9, -4.0)[:, None] + torch.arange(3.5)[:2, None]

    def spread(x):
        # The mask selects columns of rows, as it broadcasts.
        return x[:6].masked_scatter(torch.tensor([True, False, True, True, False, True]), x.roll(1, 0) * 2)

    def attended(x):
        # Windows of heads of rows.
        q, k, v = (x.roll(n, 0).reshape(2, 1, 2, 2, 6) for n in range(3))
        attend = functional.scaled_dot_product_attention
        return attend(q, k, v, is_causal=True) + attend(q, k, v, attn_mask=torch.ones(2, 2).tril(1) * 0.5)

    def distances(x):
        return sum(functional.pdist(x, p) for p in (1.0, 2.0, 3.0, float("inf")))

    return {
        "hypot": lambda x: torch.hypot(x, x + 1),
        "gamma_small": gamma(0.2, 0.6),
        "gamma_large": gamma(2.0, 30.0),
        "gamma_negative": gamma(0.2, -2.5),
        "erfinv": lambda x: torch.erfinv(torch.tanh(1.5 * x) * 0.999),
        "drawn": drawn,
        "log_ndtr": lambda x: torch.special.log_ndtr(8 * x - 10),
        # Of nothing, whose gradient is nothing.
        "lengths": lambda x: (x * 0).norm(dim=1)[:, None] + x.norm(3, dim=1)[:, None] + (x * 0).std(1)[:, None] + x.std(0, correction=0),
        "angles": lambda x: torch.atan2(x, x.roll(1, 0) * (x > 0)) + torch.atan2(x.abs() + 1, x * 0) + torch.normal(x * 0, x.abs() * 0),
        "averaged": averaged,
        "covariant": lambda x: torch.cov(x.T, correction=0) + x[:, 0].cov() + torch.corrcoef(x.T) + x[:, 1].corrcoef(),
        "combined": lambda x: torch.combinations(x[0], 3, with_replacement=True).prod(1) + torch.combinations(x[:4, 0]).sum(),
        # Torch has no gradient of it.
        "powers": lambda x: (torch.vander(x[:, 0].detach(), 4) + torch.vander(x[:4, 1].detach(), increasing=True).sum()) * x[:, 1:5],
        "sloped": lambda x: functional.rrelu(x, 0.1, 0.4),
        "enlarged": enlarged,
        "counted": counted,
        "attended": attended,
        # Axes that are not named, beside what only ONNX's exporter writes.
        "over_all": lambda x: x * torch.lgamma(x.abs() + 1).mean(dim=None) + x.mean(dim=None, keepdim=True),
        "spread": spread,
        "quantile_like": quantile_like,
        "extremes": extremes,
        "searched": searched,
        "distances": distances,
        "pooled_1": pooled(1, 5),
        "pooled_2": pooled(2, (3, 4)),
        "pooled_3": pooled(3, (3, 1, 2)),
        "reduced_mean": reduced("mean", True),
        "reduced_amax": reduced("amax", False),
        "reduced_prod": reduced("prod", True),
        "bag_sum": bag("sum"),
        "bag_mean": bag("mean", include_last_offset=True),
        "bag_max": bag("max"),
        "gaussian": lambda x: functional.gaussian_nll_loss(x, x.roll(1, 0), x.exp().mean(1), full=True),
        "gaussian_clamped": lambda x: functional.gaussian_nll_loss(x, x.roll(1, 0), x.square(), eps=0.1, reduction="none"),
    }


OPERATORS = "angles lengths covariant combined powers sloped averaged enlarged counted spread log_ndtr drawn hypot gamma_small gamma_large gamma_negative erfinv quantile_like extremes searched"
OPERATORS += " attended over_all distances pooled_1 pooled_2 pooled_3 reduced_mean reduced_amax reduced_prod bag_sum bag_mean bag_max gaussian gaussian_clamped"


def test_what_is_drawn_in_place_and_permutations_are_random(torch):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a = torch.nn.Linear(6, 6)

        def forward(self, x):
            drawn, order = torch.empty(64, 6).uniform_(0.5, 1.5), torch.randperm(32)
            outside = ((drawn < 0.5) | (drawn > 1.5)).sum() + (order.sort()[0] != torch.arange(32)).sum()
            return {"loss": outside + drawn.mean() + order[0] + 0 * self.a(x).sum()}

    plan = frit.compile(Model(), {"x": torch.randn(8, 6)}, loss="output", precision="fp32")
    with plan.trainer() as trainer:
        losses = [trainer.step({"x": torch.randn(8, 6)})["loss"] for _ in range(4)]
    assert len(set(losses)) == 4
    # The first number of the permutation, and a mean near 1.
    assert all(abs(loss - round(loss)) < 0.1 and 1 <= round(loss) <= 32 for loss in losses)


@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True, "batch_first": True}, {"bias": False}])
def test_an_lstm_may_project_its_state(torch, options):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a = torch.nn.LSTM(6, 5, proj_size=3, **options)

        def forward(self, x):
            y, (hidden, cell) = self.a(x)
            return {"loss": y.square().mean() + hidden.mean() + cell.square().mean()}

    torch.manual_seed(0)
    _, *compared = trained(torch, Model(), {"x": torch.randn(4, 5, 6)})
    check(*compared, rel=1e-5)


@pytest.mark.parametrize("name", OPERATORS.split())
def test_operators_without_an_onnx_form_are_those_of_torch(torch, name):
    function = operators(torch)[name]

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a = torch.nn.Linear(6, 6)

        def forward(self, x):
            y = function(2 * torch.tanh(self.a(x)))
            return {"loss": (y * torch.arange(1.0, y.numel() + 1).reshape(y.shape).cos()).sum() / 100}

    torch.manual_seed(0)
    plan, *compared = trained(torch, Model(), {"x": torch.randn(8, 6)})
    check(*compared, rel=1e-5)
    # ONNX's exporter writes attention with four axes only.
    assert is_archived(plan) == (name == "attended")


def test_a_linear_layer_and_its_loss_may_be_one_call(torch):
    if not hasattr(torch.nn.functional, "linear_cross_entropy"):
        pytest.skip("this torch has no linear_cross_entropy")

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.head = torch.nn.Linear(6, 6), torch.nn.LinearCrossEntropyLoss(6, 5)

        def forward(self, x, y):
            return {"loss": self.head(self.a(x), y)}

    torch.manual_seed(0)
    plan, *compared = trained(torch, Model(), {"x": torch.randn(8, 6), "y": torch.randint(0, 5, (8,))})
    check(*compared, rel=1e-5)
    assert not is_archived(plan)


# Lengths of targets and frames, and how losses are reduced.
CTC = [
    ([3, 2], [8, 6], {}),
    ([2, 0], [8, 7], {"reduction": "sum", "blank": 3}),
    ([3, 2], [3, 8], {"zero_infinity": True}),
    ([1, 2], [5, 8], {"reduction": "none"}),
]


@pytest.mark.parametrize("labels, frames, options", CTC)
@pytest.mark.parametrize("ranks, accumulation", [(1, 1), (2, 2)])
def test_ctc_is_that_of_torch(torch, labels, frames, options, ranks, accumulation):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a = torch.nn.Linear(6, 5)

        def forward(self, x, y, n):
            logs = self.a(x).log_softmax(-1).transpose(0, 1)
            lengths = torch.tensor(frames).repeat(len(x) // 2)
            loss = torch.nn.functional.ctc_loss(logs, y, lengths, n, **options)
            return {"loss": loss if options.get("reduction") is None else loss.sum() / len(x)}

    torch.manual_seed(0)
    labelled = {"y": torch.tensor([[1, 1, 2], [2, 4, -1]]), "n": torch.tensor(labels)}
    inputs = {k: v.repeat(ranks * accumulation, *[1] * (v.dim() - 1)) for k, v in labelled.items()}
    inputs["x"] = torch.randn(2 * ranks * accumulation, 8, 6)
    plan, *compared = trained(torch, Model(), inputs, ranks=ranks, accumulation=accumulation)
    check(*compared, rel=1e-5)
    assert not is_archived(plan)


@pytest.mark.parametrize("name", ["leaky_relu", "elu", "celu", "selu", "prelu", "relu"])
def test_gradients_at_zero_are_those_of_torch(torch, name):
    functional = torch.nn.functional
    activation = {"prelu": lambda h: functional.prelu(h, torch.tensor([0.1]))}.get(name) or getattr(functional, name)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = torch.nn.Linear(6, 6), torch.nn.Linear(6, 1)
            # All that the activation reads is zero.
            torch.nn.init.zeros_(self.a.weight)
            torch.nn.init.zeros_(self.a.bias)

        def forward(self, x):
            return {"loss": (self.b(activation(self.a(x))) - 1).square().mean()}

    torch.manual_seed(0)
    plan, *compared = trained(torch, Model(), {"x": torch.randn(8, 6)})
    check(*compared, rel=1e-5)


@pytest.mark.parametrize("name", ["relu6", "hardtanh", "hardsigmoid", "hardswish", "clamp", "clamp_min", "margin", "sinc", "norm", "half", "bce"])
def test_gradients_at_bounds_are_those_of_torch(torch, name):
    functional = torch.nn.functional
    # Elements at which each has a bound, or an infinite slope in the formulas it is composed of.
    elements = {"relu6": [0, 6], "hardtanh": [-1, 1], "hardsigmoid": [-3, 3], "hardswish": [-3, 3], "bce": [20, -110]}
    of = {
        "clamp": lambda h: h.clamp(0, 2),
        "clamp_min": lambda h: h.clamp(min=0.0),
        "margin": lambda h: functional.margin_ranking_loss(h, h.detach() + 0.5, torch.ones_like(h), margin=-0.5, reduction="none"),
        "sinc": torch.sinc,
        "norm": lambda h: torch.linalg.vector_norm(h[:, None], 3, dim=1),
        "half": lambda h: torch.linalg.vector_norm(h[:, None], 0.5, dim=1),
        "bce": lambda h: functional.binary_cross_entropy(h.sigmoid(), torch.tensor([1.0, 0.0]).expand_as(h), reduction="none"),
    }.get(name) or getattr(functional, name)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = torch.nn.Linear(6, 2), torch.nn.Linear(2, 1)
            torch.nn.init.zeros_(self.a.weight)
            with torch.no_grad():
                self.a.bias.copy_(torch.tensor(elements.get(name, [0, 2]), dtype=torch.float32))

        def forward(self, x):
            return {"loss": (self.b(of(self.a(x))) - 1).square().mean()}

    torch.manual_seed(0)
    plan, *compared = trained(torch, Model(), {"x": torch.randn(8, 6)})
    check(*compared, rel=1e-5)
