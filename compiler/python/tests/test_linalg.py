"""Factorizations of matrices, and what is computed by them, beside torch."""

import frit
import pytest
from test_program import check, is_archived, trained

N = 5


def functions(torch):
    """Functions of [8, 30] activations between -2 and 2."""
    linalg = torch.linalg

    def matrices(x, n=N):
        """Of a batch, or one: not symmetric, and far from singular."""
        found = x.reshape(-1)[: 240 // (n * n) * n * n].reshape(-1, n, n)
        return found + torch.eye(n).roll(1, 0) * 3

    def covariance(x):
        rows = matrices(x)
        return rows @ rows.mT + torch.eye(N)

    def vectors(x):
        return x.reshape(-1)[:40].reshape(8, N)[:4]

    def density(x):
        found = torch.distributions.MultivariateNormal(vectors(x)[0], covariance_matrix=covariance(x)[0])
        return found.log_prob(vectors(x))

    def process(x):
        inputs = x[:, :1]
        kernel = (-(inputs - inputs.mT).square()).exp() + torch.eye(8)
        lower = linalg.cholesky(kernel)
        return 0.1 * x[:, 1] @ torch.cholesky_solve(x[:, 1:2], lower) + lower.diagonal().log().sum()

    def triangles(x):
        a, b = matrices(x)[0] + 4 * torch.eye(N), vectors(x)
        found = linalg.solve_triangular(a, b.mT, upper=True).sum(1)
        found = found + linalg.solve_triangular(a, b.mT, upper=False, unitriangular=True).square().sum(1)
        return found + linalg.solve_triangular(matrices(x)[:4] + 4 * torch.eye(N), b[:, None], upper=False, left=False).sum((0, 1))

    def solutions(x):
        a, b = matrices(x)[:4], vectors(x)
        found = linalg.solve(a, b).square().sum(0) + linalg.solve(a[0], b.mT).sum(1) + linalg.solve(a[0], b[0])
        return found + linalg.solve(a, b[:, None], left=False).sum((0, 1)) + linalg.solve(a, b.mT[None, :, :2]).sum((0, 2))

    def signs(x):
        sign, size = linalg.slogdet(matrices(x, 6))
        return sign * size + torch.logdet(covariance(x))[:6].sum()

    def rotated(x):
        skew = matrices(x) - matrices(x).mT
        return linalg.matrix_exp(skew * 0.3) @ vectors(x).mT[None, :, :1] + linalg.matrix_exp(skew[:1] * 4).mean()

    return {
        "determinants": lambda x: linalg.det(matrices(x)).tanh() + linalg.det(matrices(x, 1)[:9] + 2).log(),
        "inverses": lambda x: linalg.inv(matrices(x)) @ matrices(x).mT + torch.inverse(matrices(x, 2)[0])[0, 0],
        "signs": signs,
        "solutions": solutions,
        "triangles": triangles,
        "factors": lambda x: linalg.cholesky(covariance(x)) + linalg.cholesky(covariance(x), upper=True).square(),
        "inverted": lambda x: torch.cholesky_inverse(linalg.cholesky(covariance(x))),
        "process": process,
        "density": density,
        "rotated": rotated,
    }


NAMES = "determinants inverses signs solutions triangles factors inverted process density rotated"


@pytest.fixture
def model(torch):
    def made(name):
        function = functions(torch)[name]

        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.a = torch.nn.Linear(4, 30)

            def forward(self, x):
                return {"loss": function(2 * torch.tanh(self.a(x))).square().mean() / 100}

        torch.manual_seed(0)
        return Model(), {"x": torch.randn(8, 4)}

    return made


@pytest.mark.parametrize("name", NAMES.split())
def test_matrices_are_factored_as_torch_does(torch, model, name):
    compiled, *compared = trained(torch, *model(name))
    assert not is_archived(compiled)
    check(*compared, rel=2e-4)


def test_large_matrices_are_refused(torch):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a = torch.nn.Linear(4, 100)

        def forward(self, x):
            return {"loss": torch.linalg.inv(self.a(x)).mean()}

    with pytest.raises(frit.FritError, match="the inverse of 100 x 100 matrices") as refused:
        frit.compile(Model(), {"x": torch.randn(100, 4)}, loss="output")
    assert refused.value.code == "E010"
