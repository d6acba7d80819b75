"""Losses of `torch.nn.functional` that torch cannot trace, by their definitions."""

import math


def traceable(torch):
    """The losses, by the functions that they stand for: arguments and results are theirs."""
    functional = torch.nn.functional

    def reduced(losses, reduction):
        return losses if reduction == "none" else getattr(losses, reduction)()

    def gaussian_nll_loss(input, target, var, full=False, eps=1e-6, reduction="mean"):
        # Without the check that no variance is negative, which is a condition on data.
        if not isinstance(var, torch.Tensor):
            var = input.new_full((), var)
        if var.shape != input.shape and var.dim() > 0 and var.shape == input.shape[:-1]:
            var = var.unsqueeze(-1)
        with torch.no_grad():
            clamped = var.clamp(min=eps)
        # The clamp does not count in the gradient.
        var = var + (clamped - var).detach()
        losses = 0.5 * (var.log() + (input - target) ** 2 / var)
        if full:
            losses = losses + 0.5 * math.log(2 * math.pi)
        return reduced(losses, reduction)

    def ctc_loss(
        log_probs, targets, input_lengths, target_lengths, blank=0, reduction="mean", zero_infinity=False
    ):
        if targets.dim() != 2 or log_probs.dim() != 3:
            return None
        # Of [frames, batch, classes] and [batch, labels].
        frames, batch, _ = log_probs.shape
        labels = targets.shape[1]

        def lengths(values):
            return torch.as_tensor(values, dtype=torch.int64).expand(batch)

        input_lengths, target_lengths = lengths(input_lengths), lengths(target_lengths)
        # Labels between blanks; what is behind the length of a target is never read, and may be no class.
        is_label = torch.arange(labels) < target_lengths[:, None]
        own = torch.where(is_label, targets.to(torch.int64), blank)
        between = torch.full((batch, labels, 1), blank, dtype=torch.int64)
        path = torch.cat([torch.cat([between, own[:, :, None]], 2).flatten(1), between[:, :1, 0]], 1)
        # A blank may be left out between labels that differ.
        skips = torch.cat([torch.zeros(batch, 2, dtype=torch.bool), path[:, 2:] != path[:, :-2]], 1)
        places = path.shape[1]
        # Finite, as −∞ has no difference.
        none = -1e30
        scores = log_probs.gather(2, path.expand(frames, batch, places))
        total = torch.cat([scores[0, :, :2], scores.new_full((batch, places - 2), none)], 1)
        for t in range(1, frames):
            step, skip = (torch.nn.functional.pad(total, (n, 0), value=none)[:, :places] for n in (1, 2))
            skip = torch.where(skips, skip, none)
            following = torch.logsumexp(torch.stack([total, step, skip]), 0) + scores[t]
            total = torch.where((t < input_lengths)[:, None], following, total)
        last = 2 * target_lengths[:, None]
        ends = total.gather(1, torch.cat([last, (last - 1).clamp(min=0)], 1))
        ends = torch.where((torch.arange(2) == 1) & (last == 0), none, ends)
        losses = -torch.logsumexp(ends, 1)
        losses = torch.where(losses > -none / 2, 0.0 if zero_infinity else math.inf, losses)
        if reduction == "mean":
            losses = losses / target_lengths.clamp(min=1)
        return reduced(losses, reduction)

    return {functional.gaussian_nll_loss: gaussian_nll_loss, functional.ctc_loss: ctc_loss}
