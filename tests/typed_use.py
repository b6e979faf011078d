"""What a type checker must see in a program that uses sluice. ``make lint`` checks this file.

Nothing here runs. A line with ``type: ignore`` is wrong on purpose: where a type checker does not
notice, it reports the comment as unused.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

import sluice

if TYPE_CHECKING:
    from typing import assert_type


def right(q: Tensor, model: nn.Module) -> None:
    """Accepted."""
    o, state = sluice.prefill(q, q, q, state_layout="kv", layout="bhtd", backend="reference")
    assert_type(o, Tensor)
    assert_type(state, Tensor)
    assert_type(sluice.accelerate(model), nn.Module)
    assert_type(sluice.restore(model), nn.Module)
    sluice.compat.fla.chunk_gated_delta_rule(q, q, q, q, q)
    pool = sluice.StatePool.for_model({"model_type": "qwen3_5_text"}, slots=2)
    assert_type(pool.allocate(2), list[sluice.Slot])
    with contextlib.suppress(sluice.PoolError):
        pool.free(0)


def wrong(x: Tensor, pool: sluice.StatePool) -> None:
    """Refused, line by line."""
    sluice.decodee(x, x, x)  # type: ignore[attr-defined]
    sluice.compat.flaa  # type: ignore[attr-defined]  # noqa: B018
    sluice.accelerate("name")  # type: ignore[arg-type]
    sluice.prefill(x, x, x, state_layout="vv")  # type: ignore[arg-type]
    sluice.prefill(x, x, x, layout="btd")  # type: ignore[arg-type]
    sluice.decode(x, x, x, backend="cuda")  # type: ignore[arg-type]
    sluice.conv_qkv(x, x, num_k_heads=1, num_v_heads=1, activation="relu")  # type: ignore[arg-type]
    sluice.rms_norm_gated(x, x, x, activation="none")  # type: ignore[arg-type]
    sluice.explain("prefil", x)  # type: ignore[arg-type]
    sluice.use_backend("cuda")  # type: ignore[arg-type]
    sluice.StatePool.for_model(None, slots=1)  # type: ignore[arg-type]
    sluice.StatePool(pool.geometry, 2, conv_order="DL")  # type: ignore[arg-type]
    torch.zeros(1).no_such_method()  # type: ignore[attr-defined]
