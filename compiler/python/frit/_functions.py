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

    def lstm(input, hx, params, *options):
        # With projections of the hidden state; a sequence that is packed has another second argument.
        if isinstance(hx, torch.Tensor) or hx[0].shape[2] == hx[1].shape[2]:
            return None
        has_biases, num_layers, dropout, train, bidirectional, batch_first = options
        x = input.transpose(0, 1) if batch_first else input
        directions, of_each = 1 + bidirectional, 5 if has_biases else 3
        last = []
        for layer in range(num_layers):
            ways = []
            for way in range(directions):
                place = layer * directions + way
                of_input, of_hidden, *biases, projection = params[place * of_each :][:of_each]
                gates = functional.linear(x, of_input, sum(biases) if biases else None)
                hidden, cell = hx[0][place], hx[1][place]
                steps = [None] * x.shape[0]
                for t in reversed(range(x.shape[0])) if way else range(x.shape[0]):
                    i, f, g, o = (gates[t] + hidden @ of_hidden.T).chunk(4, 1)
                    cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
                    hidden = steps[t] = (o.sigmoid() * cell.tanh()) @ projection.T
                ways.append(torch.stack(steps))
                last.append((hidden, cell))
            x = torch.cat(ways, -1)
            if layer + 1 < num_layers:
                x = functional.dropout(x, dropout, train)
        hidden, cell = (torch.stack(states) for states in zip(*last))
        return x.transpose(0, 1) if batch_first else x, hidden, cell

    found = {functional.rrelu: rrelu, torch.lstm: lstm, torch.combinations: combinations, torch.vander: vander}
    for name, function in (("cov", cov), ("corrcoef", corrcoef)):
        found[getattr(torch, name)] = found[getattr(torch.Tensor, name)] = function
    return found
