"""torch.autograd.Function: carried into the plan with its backward, or refused."""

import numpy as np
import pytest
from conftest import run

import frit


def functions(torch):
    """A straight-through estimator, a reversal, and a function that saves what it computed."""
    autograd = torch.autograd

    class Round(autograd.Function):
        @staticmethod
        def forward(ctx, x, scale):
            return torch.round(x * scale) / scale

        @staticmethod
        def backward(ctx, dy):
            return dy, None, None  # One more than it has operands, as PyTorch takes it.

    class Reverse(autograd.Function):
        @staticmethod
        def forward(x, factor):
            return x.clone()

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.factor = inputs[1]

        @staticmethod
        @autograd.function.once_differentiable
        def backward(ctx, dy):
            return -ctx.factor * dy, None

    class Linear(autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)
        def forward(ctx, x, weight, ids):
            rows = weight[ids]
            ctx.save_for_backward(x, rows, ids)
            ctx.rows = len(weight)
            return x * rows, ids

        @staticmethod
        @torch.amp.custom_bwd(device_type="cuda")
        def backward(ctx, dy, _):
            x, rows, ids = ctx.saved_tensors
            # Twice the gradient of the table, so that nothing else gives the same.
            return dy * rows, 2 * torch.zeros(ctx.rows, x.shape[1]).index_add(0, ids, dy * x), None

    return Round, Reverse, Linear


def network(torch):
    round_, reverse, linear = functions(torch)
    nn = torch.nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 4)
            self.table = nn.Parameter(torch.randn(5, 8))

        def forward(self, x, ids):
            h = round_.apply(self.a(x), 8.0)
            h, same = linear.apply(h, self.table, ids)
            h = torch.tanh(self.b(h)) + self.table[same]
            return self.c(reverse.apply(h, 0.5) + reverse.apply(h, -2.0))

    torch.manual_seed(0)
    return Net()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_backward_is_what_trains(torch, precision):
    net = network(torch)
    n, steps = 4, 6
    x, ids = torch.randn(n * steps, 6), torch.randint(0, 5, (n * steps,))
    labels = torch.randint(0, 4, (n * steps,))
    example = {"x": x[:n], "ids": ids[:n]}
    plan = frit.compile(net, example, loss="cross_entropy", precision=precision, optimizer={"lr": 1e-2})
    batches = [
        {"x": a, "ids": b, "labels": c} for a, b, c in zip(x.split(n), ids.split(n), labels.split(n))
    ]
    losses = run(plan, batches)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.01)
    expected = []
    for batch in batches:
        loss = torch.nn.functional.cross_entropy(net(batch["x"], batch["ids"]), batch["labels"])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        expected.append(loss.item())
    assert np.allclose(losses, expected, rtol=2e-5 if precision == "fp32" else 5e-2), (losses, expected)


def test_functions_that_no_file_can_carry_are_refused(torch):
    function, nn = torch.autograd.Function, torch.nn

    class Draws(function):
        @staticmethod
        def forward(ctx, x):
            return x + torch.rand_like(x)

        @staticmethod
        def backward(ctx, dy):
            return dy

    class InPlace(function):
        @staticmethod
        def forward(ctx, x):
            ctx.mark_dirty(x)
            return x.add_(1)

        @staticmethod
        def backward(ctx, dy):
            return dy

    class TooMany(function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, dy):
            return dy, dy

    def module(made):
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(4, 4)

            def forward(self, x):
                return made.apply(self.layer(x))

        return Net()

    for made, message in [(Draws, "random"), (InPlace, "in place"), (TooMany, "2 gradients for 1")]:
        with pytest.raises(frit.FritError, match=message) as refused:
            frit.compile(module(made), torch.zeros(2, 4), loss="mse")
        assert refused.value.code == "E062" and refused.value.remedy
    # What torch itself defines is what it computes.
    checkpointed = nn.Linear(4, 4)

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = checkpointed

        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(self.layer, x, use_reentrant=False)

    assert frit.compile(Checkpointed(), torch.zeros(2, 4), loss="mse").units
