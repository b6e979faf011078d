"""Checks of drafts that lie in the caller's buffers, by layer and slot; metadata alone."""

from __future__ import annotations

import torch

from sluice.contract import require as shared
from sluice.contract.draft_spec import CommitSpec, VerifySpec
from sluice.contract.meta import Meta, overlaps
from sluice.contract.require import FLOATS, INTEGERS, Require


def buffers(require: Require, spec: VerifySpec) -> None:
    """Check the buffers of one layer, which ``verify`` writes."""
    wide = torch.float64 if spec.q.dtype == torch.float64 else torch.float32
    k, d, g, x = spec.draft_k, spec.draft_d, spec.draft_g, spec.draft_x
    _given(require, k, "buffers.k", True, "verify keeps k")
    _given(require, d, "buffers.d", True, "verify keeps d")
    _given(require, g, "buffers.g", spec.g is not None, "there is a decay")
    _given(require, x, "buffers.x", spec.conv_inputs is not None, "conv_inputs is given")
    assert k is not None
    assert d is not None
    require.tensor(k, "buffers.k", (None, None, spec.HK, spec.K), (wide,), "[S, M, HK, K]")
    S, M = k.shape[:2]
    require.tensor(d, "buffers.d", (S, M, spec.HV, spec.V), (wide,), "[S, M, HV, V]")
    if g is not None:
        tail = (spec.HV, spec.K) if spec.decay == "key" else (spec.HV,)
        require.tensor(g, "buffers.g", (S, M, *tail), (wide,))
    if x is not None:
        assert spec.conv_inputs is not None
        D = spec.conv_inputs.shape[2]
        require.tensor(x, "buffers.x", (S, M, D), (spec.conv_inputs.dtype,), "[S, M, D]")
    _dense(require, {"k": k, "d": d, "g": g, "x": x})
    _rows(require, spec, S)
    if not spec.varlen:
        require(spec.T <= M, "buffers.k", f"room for {spec.T} tokens of a row", f"{M} tokens")


def by_row(require: Require, spec: CommitSpec) -> None:
    """Check a draft as ``verify`` makes it without buffers: nobody else should have changed it."""
    k, d, g = spec.draft_k, spec.draft_d, spec.draft_g
    wide = (torch.float64,) if k.dtype == torch.float64 else (torch.float32,)
    require.tensor(k, "draft.k", (None,) * 4, wide, "[B, T, HK, K]")
    B, T, HK, K = k.shape
    require.tensor(d, "draft.d", (B, T, None, None), wide, "[B, T, HV, V]")
    HV = d.shape[2]
    require(HK > 0 and HV % HK == 0, "draft.d", f"heads a multiple of k's {HK}", f"{HV} heads")
    if g is not None:
        ok = tuple(g.shape) in ((B, T, HV), (B, T, HV, K))
        expected = f"shape {[B, T, HV]} (per head) or {[B, T, HV, K]} (per key)"
        require(ok, "draft.g", expected, f"shape {list(g.shape)}")
        require.tensor(g, "draft.g", tuple(g.shape), wide)
    for x, name in ((k, "draft.k"), (d, "draft.d"), (g, "draft.g")):
        if x is not None:
            require(x.is_dense(), name, "contiguous", f"strides {list(x.strides)}")


def stacked(require: Require, spec: CommitSpec) -> None:
    """Check a commit of drafts in buffers, of one layer or of many."""
    k, d, g, x = spec.draft_k, spec.draft_d, spec.draft_g, spec.conv_inputs
    wide = (torch.float64,) if k.dtype == torch.float64 else (torch.float32,)
    require.tensor(k, "buffers.k", (None,) * 5, wide, "[layers, S, M, HK, K]")
    layers, S, M, HK, K = k.shape
    require.tensor(d, "buffers.d", (layers, S, M, None, None), wide, "[layers, S, M, HV, V]")
    HV, V = d.shape[3:]
    require(HK > 0 and HV % HK == 0, "buffers.d", f"heads a multiple of k's {HK}", f"{HV} heads")
    if g is not None:
        ok = tuple(g.shape) in ((layers, S, M, HV), (layers, S, M, HV, K))
        expected = f"shape {[layers, S, M, HV]} (per head) or {[layers, S, M, HV, K]} (per key)"
        require(ok, "buffers.g", expected, f"shape {list(g.shape)}")
        require.tensor(g, "buffers.g", tuple(g.shape), wide)
    alone = spec.cu_seqlens is None and spec.cu_seqlens_cpu is None
    require(alone, "cu_seqlens", "None: drafts in buffers are not packed", "a tensor")
    require(spec.num_accepted.dim() == 1, "num_accepted", "shape [N]",
            f"shape {list(spec.num_accepted.shape)}")  # fmt: skip
    N = spec.num_accepted.shape[0]
    require.tensor(spec.num_accepted, "num_accepted", (N,), INTEGERS, "[N]")
    require.choice(spec.state_layout, "state_layout", ("vk", "kv"))
    tail = (V, K) if spec.state_layout == "vk" else (K, V)
    _layers(require, spec.state, "state", layers, 5)
    shared.state(require, spec, (HV, *tail), N, k.dtype, spec.state.squeeze(0))
    shared.addressing(require, spec, N)
    pool = spec.conv_state
    if x is not None or pool is not None:
        together = "a tensor: buffers.x and conv_state come together"
        require(x is not None, "buffers.x", together, None)
        require(pool is not None, "conv_state", together, None)
        assert x is not None
        assert pool is not None
        require.tensor(x, "buffers.x", (layers, S, M, None), FLOATS, "[layers, S, M, D]")
        _layers(require, pool, "conv_state", layers, 4)
        shared.conv_state(require, spec, "conv_state", pool.squeeze(0), x.shape[3], 1, N)
        P = spec.state.shape[1]
        ok = pool.shape[1] >= P or not spec.pooled
        require(ok, "conv_state", f"the {P} slots of state", f"{pool.shape[1]} slots")
    _dense(require, {"k": k, "d": d, "g": g, "x": x})
    _rows(require, spec, S)


def _given(require: Require, x: Meta | None, name: str, needed: bool, why: str) -> None:
    if needed:
        require(x is not None, name, f"a tensor, since {why}", None)
    else:
        require(x is None, name, f"None, except where {why}", "a tensor")


def _dense(require: Require, given: dict[str, Meta | None]) -> None:
    for name, x in given.items():
        ok = x is None or x.is_dense()
        require(ok, f"buffers.{name}", "contiguous", f"strides {[] if x is None else [*x.strides]}")


def _rows(require: Require, spec: VerifySpec | CommitSpec, S: int) -> None:
    """Check ``draft_slots``; without them the buffers have a row for every slot."""
    if spec.draft_slots is not None:
        require.tensor(spec.draft_slots, "draft_slots", (spec.N,), INTEGERS, "[N]")
        return
    least = spec.N if spec.slots is None else spec.P
    what = "sequence" if spec.slots is None else "slot of state"
    require(least <= S, "buffers.k", f"{least} rows, one per {what}", f"{S} rows")


def _layers(require: Require, pool: Meta, name: str, layers: int, dims: int) -> None:
    """A pool of all layers, which do not overlap."""
    ok = pool.dim() == dims and pool.shape[0] == layers
    require(ok, name, f"{layers} layers in {dims} dimensions", f"shape {list(pool.shape)}")
    ok = not overlaps(pool.shape, pool.strides)
    require(ok, name, "layers without overlap", f"strides {list(pool.strides)}")
