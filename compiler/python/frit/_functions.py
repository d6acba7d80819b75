"""Functions of torch that it cannot trace, or of which there is no form in a file, by their definitions."""

import itertools


def traceable(torch):
    """The definitions, by the functions that they stand for: arguments and results are theirs."""
    functional = torch.nn.functional

    def cov(input, *, correction=1, fweights=None, aweights=None):
        # Without weights, whose checks are conditions on data.
        if fweights is not None or aweights is not None or input.is_complex():
            return None
        rows = input if input.dim() == 2 else input.reshape(1, -1)
        away = rows - rows.mean(1, keepdim=True)
        found = away @ away.T / max(rows.shape[1] - correction, 0)
        return found if input.dim() == 2 else found.reshape(())

    def corrcoef(input):
        found = cov(input)
        if found is None:
            return None
        if found.dim() == 0:
            return found / found
        size = found.diagonal().sqrt()
        return (found / size[:, None] / size).clamp(-1, 1)

    def combinations(input, r=2, with_replacement=False):
        choose = itertools.combinations_with_replacement if with_replacement else itertools.combinations
        places = list(choose(range(input.shape[0]), r))
        return input[torch.tensor(places, dtype=torch.int64).reshape(-1, r)] if r > 0 else None

    def vander(x, N=None, increasing=False):
        powers = range(x.shape[0] if N is None else N)
        powers = [x**k for k in (powers if increasing else reversed(powers))]
        return torch.stack(powers, -1) if powers else None

    def rrelu(input, lower=1 / 8, upper=1 / 3, training=False, inplace=False):
        slope = lower + (upper - lower) * torch.rand_like(input) if training else (lower + upper) / 2
        return None if inplace else torch.where(input >= 0, input, slope * input)

    found = {functional.rrelu: rrelu, torch.combinations: combinations, torch.vander: vander}
    for name, function in (("cov", cov), ("corrcoef", corrcoef)):
        found[getattr(torch, name)] = found[getattr(torch.Tensor, name)] = function
    return found
