"""Calls that tests cut, pack, pad and shard: arguments by name, with one row per sequence."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

import sluice
from sluice.testing import inputs as draw
from sluice.testing import oracle
from tests.suite import DEVICE

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
OPS = ("prefill", "decode", "verify", "causal_conv1d", "conv_qkv", "rms_norm_gated", "step")


@dataclass(frozen=True)
class Shape:
    """The sizes and options of a call; an operator ignores those it does not have."""

    Hk: int = 2
    r: int = 2
    K: int = 8
    V: int = 8
    queries: int = 0  # HQ: 0 means HK, n means n · HV
    decay: str = "head"  # "none", "head" or "key"
    delta: bool = True
    raw: bool = True
    neg_eigval: bool = False
    normalize: bool = True
    keys: str = "random"
    gates: str = "mild"
    dtype: torch.dtype = torch.float32
    state_dtype: torch.dtype = torch.float32
    state_layout: str = "vk"
    W: int = 4
    spare: int = 0  # columns of the conv state beyond W - 1
    bias: bool = True
    activation: str | None = "silu"
    order: str = "split"

    @property
    def Hv(self) -> int:  # noqa: N802
        return self.Hk * self.r

    @property
    def Hq(self) -> int:  # noqa: N802
        return self.queries * self.Hv or self.Hk

    @property
    def raw_gates(self) -> bool:
        return self.raw and self.decay != "none"

    @property
    def D(self) -> int:  # noqa: N802
        return 2 * self.Hk * self.K + self.Hv * self.V

    @property
    def qkv(self) -> tuple[int, int, int]:
        """Channels of each section."""
        return self.Hk * self.K, self.Hk * self.K, self.Hv * self.V


def shapes(**fixed: Any) -> st.SearchStrategy[Shape]:
    """Small shapes with every option, some of them fixed."""
    free: dict[str, st.SearchStrategy[Any]] = {
        "Hk": st.sampled_from((1, 2, 3)),
        "r": st.sampled_from((1, 2, 3, 4)),
        "K": st.sampled_from((4, 7, 8, 16, 20)),
        "V": st.sampled_from((3, 8, 9, 16)),
        "queries": st.sampled_from((0, 0, 1, 2)),
        "decay": st.sampled_from(("none", "head", "head", "key")),
        "delta": st.sampled_from((True, True, False)),
        "raw": st.booleans(),
        "neg_eigval": st.booleans(),
        "normalize": st.booleans(),
        "gates": st.sampled_from(draw.GATES),
        "dtype": st.sampled_from(FLOATS),
        "state_dtype": st.sampled_from(FLOATS),
        "state_layout": st.sampled_from(("vk", "kv")),
        "W": st.sampled_from((2, 3, 4)),
        "spare": st.sampled_from((0, 0, 2)),
        "bias": st.booleans(),
        "activation": st.sampled_from(("silu", None)),
        "order": st.sampled_from(("split", "interleaved")),
    }
    return st.builds(Shape, **(free | {name: st.just(x) for name, x in fixed.items()}))


seeds = st.integers(0, 2**16)


@dataclass
class Call:
    """``rows``: tensors [N, ..] or pairs of them; ``pools``: the states, addressed by slot."""

    op: str
    rows: dict[str, Any]
    fixed: dict[str, Any]
    pools: dict[str, Tensor]
    shape: Shape
    index: dict[str, Any] = field(default_factory=dict)

    def copy(self) -> Call:
        """The same call on copies of the pools."""
        return replace(self, pools={name: copied(x) for name, x in self.pools.items()})

    def pick(self, rows: Any) -> Call:
        """Some rows of the call, on the same pools."""
        index = {name: _at(x, rows) for name, x in self.index.items()}
        return replace(self, rows={n: _at(x, rows) for n, x in self.rows.items()}, index=index)

    def span(self, start: int, stop: int) -> Call:
        """Some tokens of every row, on the same pools."""
        rows = {
            name: x if name == "num_accepted" else _at(x, (slice(None), slice(start, stop)))
            for name, x in self.rows.items()
        }
        return replace(self, rows=rows)

    def arguments(self, **options: Any) -> dict[str, Any]:
        """All arguments by name, without ``num_accepted``, which is for commit."""
        return {**self.rows, **self.fixed, **self.pools, **self.index, **options}

    def run(self, backend: str | None, **options: Any) -> dict[str, Tensor]:
        """Outputs by name; a draft is committed. ``options`` are further arguments."""
        arguments = self.arguments(**options)
        accepted = arguments.pop("num_accepted", None)
        result = ask(self.op, backend, **arguments)
        if self.op == "verify":
            ask("commit", backend, result[1], accepted)
        if self.op == "conv_qkv":
            named = zip(("q", "k", "v", "g", "beta"), result, strict=True)
            return {name: x for name, x in named if x is not None}
        return {"o": result[0] if isinstance(result, tuple) else result}

    def exact(self, **options: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The oracle's float64 result: outputs, and the pools after the call."""
        given = self.arguments(**options)
        host = {name: x.cpu() if isinstance(x, Tensor) else x for name, x in given.items()}
        if self.op in ("prefill", "decode"):
            o, state = oracle.delta(**host)
            return {"o": o}, {"state": state}
        if self.op == "verify":
            o, state, conv_state = oracle.verify_commit(**host)
            return {"o": o}, {"state": state, "conv_state": conv_state}
        if self.op == "causal_conv1d":
            y, state = oracle.conv(**host)
            return {"o": y}, {"state": state}
        if self.op == "conv_qkv":
            outputs, state = oracle.conv_qkv(**host)
            return dict(zip(("q", "k", "v", "g", "beta"), outputs, strict=True)), {"state": state}
        if self.op == "step":
            y, conv_state, state = oracle.step(**host)
            return {"o": y}, {"conv_state": conv_state, "state": state}
        return {"o": oracle.rms_norm_gated(**host)}, {}

    def shard(self, rank: int, ranks: int, contiguous: bool = True) -> Call:
        """The heads of one rank, on its own pools."""

        def own(name: str, x: Any) -> Any:
            return _shard(self, name, x, rank, ranks, contiguous)

        shape = replace(self.shape, Hk=self.shape.Hk // ranks)
        return replace(
            self,
            shape=shape,
            rows={name: own(name, x) for name, x in self.rows.items()},
            fixed={name: own(name, x) for name, x in self.fixed.items()},
            pools={n: own(n, x).contiguous() for n, x in self.pools.items()},
        )


def make(op: str, shape: Shape, N: int, T: int, seed: int = 0, P: int | None = None) -> Call:
    """A call of ``op`` with N sequences of T tokens, row i in slot i of P."""
    make_one = {"rms_norm_gated": _norm, "step": _step, "causal_conv1d": _conv, "conv_qkv": _conv}
    gen = draw.generator(seed)
    rows, fixed, pools = make_one.get(op, _delta)(op, shape, N, T, gen, N if P is None else P)
    placed = {"rows": {n: _place(n, x, shape) for n, x in rows.items()}}
    placed["fixed"] = {n: _place(n, x, shape) for n, x in fixed.items()}
    if "state" in pools and op in ("causal_conv1d", "conv_qkv"):
        placed["pools"] = {"state": pools["state"].to(DEVICE, shape.dtype)}
    else:
        placed["pools"] = {n: _place(n, x, shape) for n, x in pools.items()}
    return Call(op, shape=shape, **placed)


# ------------------------------------------------------------------------------------- serving


def ask(op: str, backend: str | None, /, *args: Any, **kwargs: Any) -> Any:
    """Call ``sluice.<op>``; a refusal skips the test, or just the example in hypothesis."""
    try:
        return getattr(sluice, op)(*args, backend=backend, **kwargs)
    except sluice.BackendError as refusal:
        if hypothesis.currently_in_test_context():
            hypothesis.reject()
        pytest.skip(str(refusal))


# ---------------------------------------------------------------------------- rows and sequences


def index(values: list[int], dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def packing(lengths: list[int], dtype: torch.dtype = torch.int32) -> dict[str, Tensor]:
    """``cu_seqlens``, and on a GPU its host copy: some backends plan there."""
    bounds = draw.cu_seqlens(lengths, dtype)
    host = {} if DEVICE == "cpu" else {"cu_seqlens_cpu": bounds}
    return {"cu_seqlens": bounds.to(DEVICE), **host}


def spans(lengths: list[int]) -> list[tuple[int, int]]:
    bounds = draw.cu_seqlens(lengths).tolist()
    return list(itertools.pairwise(bounds))


def copied(pool: Tensor) -> Tensor:
    """A pool with the same strides and every bit of its storage, gaps included."""
    size = pool.untyped_storage().nbytes() // pool.element_size()
    whole = pool.as_strided((size,), (1,), 0).clone()
    return whole.as_strided(pool.shape, pool.stride(), pool.storage_offset())


def spread(gen_seed: int, P: int, n: int, first: int = 0) -> list[int]:
    """n different slots of P in random order."""
    return draw.choose_slots(draw.generator(gen_seed), P, n, first)


# ------------------------------------------------------------------------------------ the parts


def _delta(op: str, s: Shape, N: int, T: int, gen: torch.Generator, P: int) -> Any:
    q, k = draw.keys(gen, N, T, s.Hq, s.K), draw.keys(gen, N, T, s.Hk, s.K, s.keys)
    if s.normalize:
        q, k = (x * (0.5 + 3 * draw.uniform(gen, *x.shape[:3], 1)) for x in (q, k))
    rows: dict[str, Any] = {"q": q, "k": k, "v": draw.normal(gen, N, T, s.Hv, s.V)}
    fixed: dict[str, Any] = {"normalize_qk": s.normalize, "state_layout": s.state_layout}
    a = draw.raw_decay(gen, N, T, s.Hv, s.gates, s.K if s.decay == "key" else None)
    b = draw.raw_beta(gen, N, T, s.Hv)
    if s.decay != "none":
        rows["g"] = a["a"] if s.raw_gates else draw.decay(**a)
    if s.delta:
        rows["beta"] = b if s.raw_gates else b.sigmoid()
    if s.raw_gates:
        fixed |= {"A_log": a["A_log"], "dt_bias": a["dt_bias"]}
        fixed["neg_eigval"] = s.neg_eigval and s.delta
    state = draw.recurrent_state(gen, P, s.Hv, s.V, s.K)
    pools = {"state": state if s.state_layout == "vk" else state.mT.contiguous()}
    if op == "verify":
        rows["num_accepted"] = torch.randint(T + 1, (N,), generator=gen)
        rows["conv_inputs"] = draw.normal(gen, N, T, s.D)
        pools["conv_state"] = draw.normal(gen, P, s.D, s.W - 1 + s.spare)
    return rows, fixed, pools


def _conv(op: str, s: Shape, N: int, T: int, gen: torch.Generator, P: int) -> Any:
    rows: dict[str, Any] = {"x": draw.normal(gen, N, T, s.D)}
    fixed = {"activation": s.activation, **_conv_weights(s, gen, "")}
    if op == "conv_qkv":
        raw = draw.raw_decay(gen, N, T, s.Hv, s.gates)
        rows |= {"a": raw["a"], "b": draw.raw_beta(gen, N, T, s.Hv)}
        fixed |= {"A_log": raw["A_log"], "dt_bias": raw["dt_bias"], "neg_eigval": s.neg_eigval}
        fixed |= {"num_k_heads": s.Hk, "num_v_heads": s.Hv, "head_k_dim": s.K, "head_v_dim": s.V}
        fixed["normalize_qk"] = s.normalize
    return rows, fixed, {"state": draw.normal(gen, P, s.D, s.W - 1 + s.spare)}


def _norm(op: str, s: Shape, N: int, T: int, gen: torch.Generator, P: int) -> Any:
    rows = {name: draw.normal(gen, N, T, s.Hv, s.V) for name in ("x", "z")}
    return rows, {"weight": 1 + 0.2 * draw.normal(gen, s.V)}, {}


def _step(op: str, s: Shape, N: int, T: int, gen: torch.Generator, P: int) -> Any:
    raw = draw.raw_decay(gen, N, T, s.Hv, s.gates)
    rows = {
        "qkvz": draw.normal(gen, N, T, s.D + s.Hv * s.V),
        "ba": draw.normal(gen, N, T, 2 * s.Hv),
    }
    fixed = {"A_log": raw["A_log"], "dt_bias": raw["dt_bias"], **_conv_weights(s, gen, "conv_")}
    fixed |= {"norm_weight": 1 + 0.2 * draw.normal(gen, s.V), "order": s.order}
    fixed |= {"conv_activation": s.activation, "normalize_qk": s.normalize}
    fixed |= {"neg_eigval": s.neg_eigval, "state_layout": s.state_layout}
    state = draw.recurrent_state(gen, P, s.Hv, s.V, s.K)
    window = draw.normal(gen, P, s.D, s.W - 1 + s.spare)
    return (
        rows,
        fixed,
        {
            "conv_state": window,
            "state": state if s.state_layout == "vk" else state.mT.contiguous(),
        },
    )


def _conv_weights(s: Shape, gen: torch.Generator, prefix: str) -> dict[str, Any]:
    weight, bias = draw.normal(gen, s.D, s.W) / s.W**0.5, draw.normal(gen, s.D)
    return {f"{prefix}weight": weight, f"{prefix}bias": bias if s.bias else None}


def _place(name: str, x: Any, shape: Shape) -> Any:
    """Move to the device: gates in float32, states in the state dtype, the rest in the dtype."""
    if not isinstance(x, Tensor):
        return x
    if name == "num_accepted":
        return x.to(DEVICE)
    dtype = shape.state_dtype if name == "state" else shape.dtype
    wide = name in ("A_log", "dt_bias") or (name in ("g", "beta") and not shape.raw_gates)
    return x.to(DEVICE, torch.float32 if wide else dtype)


def _at(x: Any, where: Any) -> Any:
    if isinstance(x, tuple):
        return tuple(y[where] for y in x)
    return x[where] if isinstance(x, Tensor) else x


def _shard(call: Call, name: str, x: Any, rank: int, ranks: int, contiguous: bool) -> Any:
    """One rank's part of an argument, from each section with heads or channels."""
    s, conv = call.shape, call.op in ("causal_conv1d", "conv_qkv")
    if name in ("num_k_heads", "num_v_heads"):
        return x // ranks
    if not isinstance(x, Tensor) or name in ("num_accepted", "norm_weight"):
        return x
    if call.op == "rms_norm_gated" and name == "weight":
        return x
    channels = name in ("conv_inputs", "conv_state", "conv_weight", "conv_bias")
    if channels or (conv and name in ("x", "weight", "bias", "state")):
        dim = {"conv_inputs": 2, "x": 2, "state": 1, "conv_state": 1}.get(name, 0)
        return sections(x, dim, s.qkv, rank, ranks)
    if name == "qkvz" and s.order == "split":
        return sections(x, 2, (*s.qkv, s.Hv * s.V), rank, ranks)
    if name == "ba" and s.order == "split":
        return sections(x, 2, (s.Hv, s.Hv), rank, ranks)
    dim = {"state": 1, "A_log": 0, "dt_bias": 0}.get(name, 2)
    part = sections(x, dim, (x.shape[dim],), rank, ranks)
    return part.contiguous() if contiguous else part


def sections(x: Tensor, dim: int, sizes: tuple[int, ...], rank: int, ranks: int) -> Tensor:
    """The rank's part of each section of a dimension, joined; a view if there is one section."""
    parts = [y.chunk(ranks, dim)[rank] for y in x.split(sizes, dim)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)
