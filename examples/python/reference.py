"""What the examples share: PyTorch's own training, and the comparison with it."""

import copy

import torch


def batches_of(data, size):
    """Batches of a dict of tensors, whose first axis is examples."""
    n = len(next(iter(data.values())))
    for begin in range(0, n, size):
        yield {name: x[begin : begin + size] for name, x in data.items()}


def train(module, batches, loss_of, lr=1e-3, optimizer=None):
    """Trains a copy of a module as Frit does by default: AdamW, gradients clipped to a norm of 1.

    Returns the losses, the norms of the gradients, and the copy.
    """
    module = copy.deepcopy(module).train()
    parameters = [p for p in module.parameters() if p.requires_grad]
    optimizer = optimizer(parameters) if optimizer else torch.optim.AdamW(parameters, lr=lr, weight_decay=0.01)
    losses, norms = [], []
    for batch in batches:
        loss = loss_of(module, batch)
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, 1.0)))
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, norms, module


def compare(what, found, expected, tolerance):
    """Prints numbers beside those of PyTorch, which must be close."""
    for step, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        print(f"{what} {step}: {ours:.7f}   PyTorch {theirs:.7f}")
        assert abs(ours - theirs) <= tolerance * abs(theirs), f"{what} {step}: {ours} is not {theirs}"


def compare_metrics(found, losses, norms, tolerance=2e-5):
    """Compares the metrics of steps with PyTorch's losses and norms of gradients."""
    compare("loss", [m["loss"] for m in found], losses, tolerance)
    compare("norm of gradients", [m["grad_norm"] for m in found], norms, 20 * tolerance)


def compare_modules(found, expected, tolerance=1e-4):
    """Compares the parameters and buffers of two modules. Where the gradient is 0 up to rounding, Adam's steps have any sign,
    so that single elements may differ by the steps."""
    theirs = expected.state_dict()
    for name, x in found.state_dict().items():
        if x.is_floating_point():
            difference = (x - theirs[name]).abs().mean()
            assert difference <= tolerance * (1 + theirs[name].abs().mean()), f"{name} differs by {difference} on average"
