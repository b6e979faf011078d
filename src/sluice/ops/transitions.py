"""``transitions``: what tokens do to any state. No program calls it; sequences over ranks do."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sluice import calls
from sluice.calls import Canonical, Operator
from sluice.contract import checks
from sluice.contract.names import BackendName
from sluice.contract.spec import DeltaSpec

_STATE = DeltaSpec.TENSORS.index("state")
_SEGMENT = DeltaSpec.OPTIONS.index("checkpoint_every")


def transitions(
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    *,
    segment: int,
    normalize_qk: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    neg_eigval: bool = False,
    batch_invariant: bool = False,
    backend: BackendName | None = None,
) -> Tensor:
    """The affine maps that a row's tokens are, from its first token to the end of each segment.

    Whatever the state S [K, V] before the tokens, the state after them is ``M S + S_zero``
    (docs/distributed.md, (X1)).

    Args:
        k: [B, T, HK, K]. v: [B, T, HV, V]. g: [B, T, HV], [B, T, HV, K] or None. beta: [B, T, HV].
            These and the other options are as in :func:`sluice.prefill`.
        segment: tokens of a segment, a multiple of 64. Segments may run in parallel.

    Returns:
        [B, segments, HV, K, V + K] in float32 (float64 for float64 inputs): S_zero | M. The last
        of a row's maps is that of all its tokens.

    >>> import torch, sluice
    >>> k, v = torch.nn.functional.normalize(torch.ones(1, 3, 1, 2), dim=-1), torch.ones(1, 3, 1, 4)
    >>> (made,) = transitions(k, v, None, torch.ones(1, 3, 1), segment=64)
    >>> S_zero, M = made[0, 0].split([4, 2], dim=-1)
    >>> before = torch.randn(1, 1, 2, 4)
    >>> _, after = sluice.prefill(k, k, v, None, torch.ones(1, 3, 1), initial_state=before,
    ...                           state_layout="kv")
    >>> torch.allclose(M @ before[0, 0] + S_zero, after[0, 0], atol=1e-6)
    True
    """
    tensors = [k, k, v, g, beta, A_log, dt_bias, *[None] * (len(DeltaSpec.TENSORS) - 7)]
    options = (1.0, normalize_qk, neg_eigval, -1, "kv", segment, batch_invariant)
    made: Tensor = calls.call(TRANSITIONS, tensors, options, None, backend)[_STATE]
    return made


def _canonical(t: Any, options: tuple[Any, ...], form: None) -> Canonical:
    """The tensors as they are, and the maps."""
    wide = torch.promote_types(t.v.dtype, torch.float32)
    (B, T), (HV, V), K = t.k.shape[:2], t.v.shape[-2:], t.k.shape[-1]
    segments = max(-(-T // max(options[_SEGMENT], 1)), 1)
    return Canonical(t._replace(state=t.v.new_empty(B, segments, HV, K, V + K, dtype=wide)))


TRANSITIONS = Operator(
    "transitions", DeltaSpec, _canonical, checks.transitions, None, ("state", "out")
)
calls.INTERNAL[TRANSITIONS.name] = TRANSITIONS
