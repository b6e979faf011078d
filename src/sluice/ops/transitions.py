"""``prefill`` in two passes, for sequences over ranks: before its state is known, and after.

No program calls these. Whatever the state S [K, V] before tokens, the state after them is
``M S + S_zero`` (docs/distributed.md, (X1)).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from sluice import calls
from sluice.calls import Canonical, Operator
from sluice.contract import checks
from sluice.contract.names import BackendName
from sluice.contract.spec import PassSpec
from sluice.ops.delta import prefill

_MAP = PassSpec.TENSORS.index("map")


class Passes(NamedTuple):
    """The arguments that both passes have: those of ``prefill``, from ``state`` into ``out``.

    k [B, T, HK, K], v, g and beta likewise; all but ``segment`` as in :func:`sluice.prefill`. A
    first pass alone needs no ``out``.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    beta: Tensor | None
    state: Tensor  # [B, HV, V, K], read and written by ``resume`` alone
    segment: int  # tokens, a multiple of 64; segments may run side by side
    out: Tensor | None = None
    A_log: Tensor | None = None
    dt_bias: Tensor | None = None
    scale: float | None = None
    normalize_qk: bool = False
    neg_eigval: bool = False
    batch_invariant: bool = False
    backend: BackendName | None = None

    def _call(self, op: Operator, kept: Tensor | None) -> list[Any]:
        given = {**self._asdict(), "kept": kept}
        tensors = [given.get(name) for name in PassSpec.TENSORS]
        known = {"pad_slot": -1, "state_layout": "vk", "checkpoint_every": 0, **given}
        options = tuple(known[name] for name in PassSpec.OPTIONS)
        return calls.call(op, tensors, options, None, self.backend)


def transitions(call: Passes) -> tuple[Tensor, Tensor]:
    """The first pass: the map of each row's tokens.

    Returns:
        [B, HV, K, V + K] in float32 (float64 for float64 inputs), S_zero | M; and what ``resume``
        needs.

    >>> import torch, sluice
    >>> k, v = torch.nn.functional.normalize(torch.ones(1, 3, 1, 2), dim=-1), torch.ones(1, 3, 1, 4)
    >>> beta, before = torch.ones(1, 3, 1), torch.randn(1, 1, 4, 2)
    >>> made, _ = transitions(Passes(k, k, v, None, beta, before, segment=64))
    >>> S_zero, M = made[0, 0].split([4, 2], dim=-1)
    >>> _, after = sluice.prefill(k, k, v, None, beta, initial_state=before)
    >>> torch.allclose(M @ before[0, 0].mT + S_zero, after[0, 0].mT, atol=1e-6)
    True
    """
    kept = call.v.new_empty(0, dtype=torch.uint8)
    made: Tensor = call._call(TRANSITIONS, kept)[_MAP]
    return made, kept


def resume(call: Passes, kept: Tensor) -> None:
    """The second pass: ``out`` and the final state, by the same call with ``state`` filled in.

    Where the backend of the first pass kept nothing, it is an ordinary prefill.
    """
    if kept.numel() > 0:
        call._call(RESUME, kept)
        return
    options = call._asdict()
    del options["segment"]
    prefill(**options)


def _canonical(t: Any, options: tuple[Any, ...], form: None) -> Canonical:
    """The tensors as they are, and the map."""
    wide = torch.promote_types(t.v.dtype, torch.float32)
    B, (HV, V), K = t.k.shape[0], t.v.shape[-2:], t.k.shape[-1]
    return Canonical(t._replace(map=t.v.new_empty(B, HV, K, V + K, dtype=wide)))


TRANSITIONS = Operator(
    "transitions", PassSpec, _canonical, checks.passes, None, ("state", "out", "map", "kept")
)
RESUME = TRANSITIONS._replace(name="resume", canonical=lambda t, options, form: Canonical(t))
