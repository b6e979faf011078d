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
from sluice.testing.case import Case
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

    def case(self, op: str, N: int, T: int, seed: int) -> Case:
        """N sequences of T tokens, row i in slot i; ``verify`` accepts any number of them."""
        rule, neg_eigval = "gated_delta", self.neg_eigval
        if op in ("prefill", "decode", "verify"):
            gated = "" if self.decay == "none" else "gated"
            rule = "_".join(filter(None, (gated, "delta" if self.delta else ""))) or "linear"
            neg_eigval = self.neg_eigval and self.raw_gates and self.delta
        accepted = torch.randint(T + 1, (N,), generator=draw.generator(seed)).tolist()
        return Case(
            f"calls/{op}", op, Hk=self.Hk, Hv=self.Hv, Hq=self.Hq, K=self.K, V=self.V, batch=N,
            tokens=T, rule=rule, per_key=self.decay == "key", raw=self.raw_gates,
            neg_eigval=neg_eigval, normalize=self.normalize, keys=self.keys, gates=self.gates,
            state="rows", state_dtype=self.state_dtype, state_layout=self.state_layout, W=self.W,
            columns=self.W - 1 + self.spare, with_conv=op == "verify", bias=self.bias,
            accepted=accepted, activation=self.activation, order=self.order,
            index_dtype=torch.int64,
        )  # fmt: skip


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


ROWS = ("q", "k", "v", "g", "beta", "x", "z", "a", "b", "qkvz", "ba", "conv_inputs", "num_accepted")


def make(op: str, shape: Shape, N: int, T: int, seed: int = 0, P: int | None = None) -> Call:
    """A call of ``op`` with N sequences of T tokens, row i in slot i of P."""
    P = N if P is None else P
    given = shape.case(op, max(N, P), T, seed).inputs(shape.dtype, DEVICE, seed)
    pools = {n: given.pop(n)[:P].clone() for n in ("state", "conv_state") if n in given}
    rows = {n: given.pop(n)[:N] for n in ROWS if n in given}
    return Call(op, rows=rows, fixed=given, pools=pools, shape=shape)


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
