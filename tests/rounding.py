"""How to judge a bfloat16 model: its error against float32 weights may not exceed stock's.

Rounding alone makes two bfloat16 models differ, and where tokens nearly tie it decides which one is
chosen. So the model with float32 weights is the reference, and stock's distance from it shows the
effect of rounding. Errors are taken per token and compared by quantiles: single tokens are badly
conditioned in every model (a norm of almost nothing, experts that tie), and they would dominate a
sum of squares.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

# (share of the tokens, how many times stock's error it may have). Over 24 random models on a CPU
# the median of a hundred tokens was 0.86 to 1.03 times stock's, the ninth decile 0.8 to 1.15 times.
QUANTILES = ((0.5, 1.1), (0.9, 1.25))
# By rounding, the worst single token in these was off by 0.14; an unrelated one is off by 1.4.
WORST = 0.5
FLOOR = 1e-4  # allowed where stock has no error


def errors(found: Tensor, exact: Tensor) -> Tensor:
    """‖found − exact‖ / ‖exact‖ of each vector in the last dimension; zeros must be zeros."""
    found, exact = found.flatten(0, -2).double(), exact.flatten(0, -2).double()
    return (found - exact).norm(dim=-1) / exact.norm(dim=-1).clamp(min=1e-30)


def as_good(found: Tensor, stock: Tensor, exact: Tensor, name: str) -> None:
    """Require vectors (in the last dimension) to be as close to the exact ones as stock's are."""
    assert found.shape == stock.shape == exact.shape, name
    assert bool(torch.isfinite(found).all()), f"{name}: not finite"
    mine, theirs = errors(found, exact), errors(stock, exact)
    for share, factor in QUANTILES:
        a, b = float(mine.quantile(share)), float(theirs.quantile(share))
        text = f"{name}: {share:.0%} of {mine.numel()} are within {a:.2e}, of stock within {b:.2e}"
        assert a <= factor * b + FLOOR, text
    at = int(mine.argmax())
    assert mine[at] < WORST, f"{name}: vector {at} is off by {float(mine[at]):.2f}"


def forced(model: nn.Module, prompts: list[Tensor], new: Tensor) -> Tensor:
    """The logits [B, n, vocabulary] from which each of ``new`` [B, n] is chosen; each row alone."""
    n, rows = new.shape[1], []
    for prompt, chosen in zip(prompts, new, strict=True):
        ids = torch.cat([prompt, chosen]).unsqueeze(0)
        rows.append(model(ids[:, :-1], use_cache=False).logits[0, -n:].float())
    return torch.stack(rows)


def near_best(exact: Tensor, stock: Tensor, chosen: Tensor, name: str) -> None:
    """Require each token of ``chosen`` [B, n] to be the exact model's best, or to tie with it.

    ``exact`` and ``stock`` are their logits after the same tokens. Two logits, each off by stock's
    largest error, change places if they are within twice that error: ``swing``.
    """
    swing = 2 * (stock - exact).abs().amax(-1)
    usual = swing.median()
    best = exact.topk(2).values
    decided = float(((best[..., 0] - best[..., 1]) > usual).float().mean())
    assert decided > 0.5, f"{name}: only {decided:.0%} of the tokens are not ties"
    behind = best[..., 0] - exact.gather(-1, chosen.unsqueeze(-1)).squeeze(-1)
    text = f"{name}: {float(behind.max()):.3f} behind the best, twice the rounding is {usual:.3f}"
    assert float((behind > usual).float().mean()) <= 0.02, f"{text}, for more than 2 in 100"
    assert bool((behind <= swing.max()).all()), f"{text}, {swing.max():.3f} at most"
