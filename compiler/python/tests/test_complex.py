"""Modules that compute with complex tensors, beside torch."""

import numpy as np
import pytest
from test_program import SGD, check, is_archived, trained

import frit


def operations(torch):
    """Functions of complex [4, 6] activations `z` and `w`, by name."""
    one = torch.view_as_complex

    def shapes(z, w):
        y = z.reshape(2, 2, 6).transpose(0, -1).unsqueeze(1).squeeze(1).permute(2, 1, 0).flatten(0, 1)
        y = torch.cat([y, w.unsqueeze(0).expand(2, 4, 6)[1]], -1).roll(2, 1).flip(0)
        return torch.stack([y[1:, ::2], y[:3, 1::2]], -1).view(3, -1).contiguous()

    def parts(z, w):
        a, b = z.split([2, 4], 1)
        c = torch.nn.functional.pad(a, (1, 1)) + b.chunk(2, 1)[0].repeat(1, 2) - w.unbind(0)[2][:4]
        return c.repeat_interleave(2, 1)[:, torch.tensor([0, 3, 3])] * w[:, :1].t().mT

    def written(z, w):
        y = torch.zeros(4, 8, dtype=torch.cfloat)
        y[:, 1:7] = z * w
        return torch.where(y.real > 0, y, torch.ones_like(y))

    def masked(z, w):
        y = z.clone()
        y[:, 0] = y[:, 1] * 2
        y[0] = 1j
        y[z.abs() > 0.7] = 0
        return y.masked_fill(w.real > 0.5, 2 - 1j) * w

    def kinds(z, w):
        whole = (z * 5).to(torch.int64).float() + w.to(torch.bool).float() + torch.arange(24).reshape(4, 6).to(torch.cfloat) * z
        return whole.transpose(0, 1).contiguous().view(-1) + z.sum().sum() + (z * (w.real > 0)).abs().sum()

    return {
        "masked": masked,
        "kinds": kinds,
        "picked": lambda z, w: z.gather(1, torch.tensor([[0, 3], [1, 1], [5, 2], [4, 0]])) * torch.vdot(z[0], w[1]) + w.cumsum(0)[:, :2] + (z**3).norm(dim=1, keepdim=True),
        "shapes": shapes,
        "parts": parts,
        "written": written,
        "sums": lambda z, w: torch.sub(z + 1, w, alpha=2) + w.real + 2j - w.mean(0) + z.sum(-1, keepdim=True) + w.mean(),
        "products": lambda z, w: z * w * 2 + z * w.imag - 1j * w + z.square() + w**2,
        "quotients": lambda z, w: z / (w + 3) + 1 / (z + 3) + w / z.real.exp() + z / 4 + torch.reciprocal(w - 4),
        "matrices": lambda z, w: z @ w.mH + torch.einsum("ik,jk->ij", z, w.conj()) + z.real.to(z.dtype) @ w.adjoint() @ one(torch.ones(4, 4, 2)),
        "polar": lambda z, w: torch.polar(z.abs(), w.angle()) + torch.complex(z.imag, w.real) + torch.exp(z / 4),
        "spectra": lambda z, w: torch.fft.ifft(torch.fft.fft(z, dim=-1) * torch.fft.rfft(w.real, n=10) + z.conj(), dim=0),
    }


NAMES = ["masked", "kinds", "picked", "shapes", "parts", "written", "sums", "products", "quotients", "matrices", "polar", "spectra"]


@pytest.mark.parametrize("name", NAMES)
def test_operations_are_those_of_torch(torch, name):
    function = operations(torch)[name]

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = torch.nn.Linear(6, 12), torch.nn.Linear(6, 12)

        def forward(self, x):
            z, w = (torch.view_as_complex(torch.tanh(m(x)).reshape(4, 6, 2)) for m in (self.a, self.b))
            y = torch.view_as_real(function(z, w))
            return {"loss": (y * torch.arange(1.0, y.numel() + 1).reshape(y.shape).cos()).sum() / 30}

    torch.manual_seed(0)
    plan, *compared = trained(torch, Model(), {"x": torch.randn(4, 6)})
    check(*compared, rel=1e-5)
    # There is no ONNX form of a write at a mask.
    assert is_archived(plan) == (name == "masked")


def models(torch):
    """Layers with complex buffers and parameters, by name: of [batch, 6, 8] activations."""

    class Rotated(torch.nn.Module):
        """Positions as rotations, by a table of complex numbers."""

        def __init__(self):
            super().__init__()
            self.a = torch.nn.Linear(8, 8)
            angles = torch.outer(torch.arange(16.0), 0.1 ** torch.arange(4))
            self.register_buffer("table", torch.polar(torch.ones_like(angles), angles))

        def forward(self, x):
            z = torch.view_as_complex(self.a(x).reshape(*x.shape[:-1], -1, 2))
            table = self.table[: x.shape[1]].view(1, x.shape[1], 4)
            return torch.view_as_real(z * table).flatten(-2).type_as(x)

    class Spectral(torch.nn.Module):
        """A Fourier neural operator, whose parameter is complex."""

        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.randn(6, 6, 3, dtype=torch.cfloat) / 6)
            self.still = torch.nn.Parameter(torch.randn(6, 1, dtype=torch.cfloat), requires_grad=False)

        def forward(self, x):
            modes = torch.fft.rfft(x)
            y = torch.zeros(x.shape[0], 6, 5, dtype=torch.cfloat)
            y[:, :, :3] = torch.einsum("bix,iox->box", modes[:, :, :3], self.w) + self.still
            return x + torch.fft.irfft(y, n=8)

    class Turned(torch.nn.Module):
        """Operations along axes of a parameter, which are counted from its last."""

        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.randn(6, 4, dtype=torch.cfloat))

        def forward(self, x):
            w = self.w.flip(-1).roll(1, -1) + self.w.mean(-1, keepdim=True) + self.w.unsqueeze(-1).squeeze(-1)
            z = torch.view_as_complex(x.reshape(-1, 6, 4, 2)) * w + self.w.T.mH.conj() * self.w.sum()
            return torch.view_as_real(torch.stack([z, w.expand_as(z)], -1).sum(-1)).flatten(-2)

    return {"rotated": Rotated, "spectral": Spectral, "turned": Turned}


@pytest.mark.parametrize("name", ["rotated", "spectral", "turned"])
@pytest.mark.parametrize("ranks, accumulation", [(1, 1), (2, 2)])
def test_complex_tables_and_parameters(torch, name, ranks, accumulation):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = models(torch)[name]()
            self.out = torch.nn.Linear(8, 1)

        def forward(self, x):
            return {"loss": self.out(self.layer(x)).sin().square().mean()}

    torch.manual_seed(0)
    module, x = Model(), torch.randn(2 * ranks * accumulation, 6, 8)
    plan, found, expected, state, reference = trained(torch, module, {"x": x}, ranks=ranks, accumulation=accumulation)
    check(found, expected, state, reference, rel=1e-5)
    # The state is one of the module, and comes back.
    module.load_state_dict(state)
    with plan.trainer() as trainer:
        trainer.load_state_dict(module.state_dict())
        again = trainer.state_dict()
        pairs = trainer.state_dict(framework="numpy")
    assert all(torch.equal(again[name], value) for name, value in module.state_dict().items())
    if name == "spectral":
        assert again["layer.w"].is_complex() and pairs["layer.w"].shape == (6, 6, 3, 2)
        assert np.array_equal(pairs["layer.w"], torch.view_as_real(again["layer.w"]).numpy())
        frozen = [row["parameter"] for row in plan.units if row["kind"] == "frozen"]
        assert frozen == ["layer.still"]


@pytest.mark.parametrize("name", ["conjugate", "region"])
def test_lost_writes_are_refused(torch, name):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.randn(4, dtype=torch.cfloat))

        def forward(self, x):
            y = x * self.w
            if name == "conjugate":
                y.conj()[:, 0] = 1
            else:
                with torch.no_grad():
                    y.mul_(2)
            return {"loss": (y * self.w).abs().square().mean()}

    with pytest.raises(frit.FritError, match=r"\[E032\] `forward` writes"):
        frit.compile(Model(), torch.randn(8, 4), loss="output", optimizer=SGD)


def test_a_complex_input_is_refused(torch):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a = torch.nn.Linear(4, 4)

        def forward(self, x):
            return {"loss": self.a(x.abs()).square().mean()}

    with pytest.raises(frit.FritError, match=r"\[E032\] the input `x` is complex"):
        frit.compile(Model(), torch.randn(8, 4, dtype=torch.cfloat), loss="output", optimizer=SGD)
