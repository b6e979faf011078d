"""``Case``: one named call as data, with its inputs, its exact result and its check.

They are used in this order:

    inputs = case.inputs(torch.bfloat16, "cpu", seed=0)
    expected = case.expected(inputs)           # before the call: pools are updated in place
    actual = case.run(sluice, inputs, backend="reference")
    case.check(actual, expected)
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from sluice.testing import build, compare, counts, oracle
from sluice.testing.rows import live_rows, saves, sequences

DELTA_OPS = ("prefill", "decode", "verify")
CONV_OPS = ("causal_conv1d", "conv_qkv")
OPS = (*DELTA_OPS, *CONV_OPS, "rms_norm_gated", "step")
POOLS = ("state", "conv_state")
RULES = ("linear", "gated", "delta", "gated_delta")


@dataclass(frozen=True)
class Case:
    """A call of one public function. Every field but ``name`` and ``op`` has a plain default."""

    name: str
    op: str
    dtypes: tuple[torch.dtype, ...] = (torch.float32,)

    # Heads. Hq is Hk unless given; D is 2·Hk·K + Hv·V unless given (causal_conv1d only).
    Hk: int = 2
    Hv: int = 4
    Hq: int | None = None
    K: int = 32
    V: int = 32
    D: int | None = None

    # Tokens: batch × tokens, or packed sequences of these lengths and a tail of no sequence.
    batch: int = 1
    tokens: int = 1
    lengths: tuple[int, ...] | None = None
    tail: int = 0
    flat: bool = False  # packed as [T, ..], not [1, T, ..]
    host_lengths: bool = False  # pass cu_seqlens_cpu as well
    index_dtype: torch.dtype = torch.int32
    layout: str | None = None
    strided: bool = False  # views of one packed projection

    # Rule and gates.
    rule: str = "gated_delta"
    per_key: bool = False
    raw: bool = False
    neg_eigval: bool = False
    normalize: bool = False
    scale: float | None = None
    keys: str = "random"
    gates: str = "mild"
    beta_one: bool = False

    # State: "none", "rows" (row i is sequence i) or "slots"; then the rows that are special.
    state: str = "slots"
    state_dtype: torch.dtype = torch.float32
    state_layout: str = "vk"
    gap: int = 0  # elements between rows of the pool
    moved: bool = False  # write_slots differ from slots
    padded: tuple[int, ...] = ()
    unkept: tuple[int, ...] = ()  # computed, not written
    each: bool = False  # decode: a write slot for each token; one of them is the row's own
    new: tuple[int, ...] = ()  # has_state False
    pad_slot: int = -1
    every: int | None = None
    positions: tuple[tuple[int, ...], ...] | None = None
    accepted: tuple[int, ...] | None = None  # verify
    buffered: bool = False  # verify: the draft in buffers, by slot

    # Convolution, norm, layer.
    W: int = 4
    columns: int | None = None  # L of the conv state, W − 1 unless given
    conv_order: str = "dl"  # "ld": stored [P, L, D]
    with_conv: bool = False  # verify: roll a conv window too
    bias: bool = True
    activation: str | None = "silu"
    gate_activation: str = "silu"
    freeze: bool = False
    starts: tuple[int, ...] | None = None  # the column at which each row's window starts
    order: str = "split"
    pairs: bool = False  # (qkv, z) and (b, a) in place of one tensor each

    def __post_init__(self) -> None:
        if self.op not in OPS:
            raise ValueError(f"{self.name}: op must be one of {OPS}, got {self.op!r}")
        if self.rule not in RULES:
            raise ValueError(f"{self.name}: rule must be one of {RULES}, got {self.rule!r}")

    # ------------------------------------------------------------------------------- dimensions

    @property
    def sequence_lengths(self) -> tuple[int, ...]:
        return (self.tokens,) * self.batch if self.lengths is None else self.lengths

    @property
    def N(self) -> int:  # noqa: N802
        return len(self.sequence_lengths)

    @property
    def grid(self) -> tuple[int, int]:
        """(B, T) of the token tensors, the padded tail included."""
        if self.lengths is None:
            return self.batch, self.tokens
        return 1, sum(self.lengths) + self.tail

    @property
    def channels(self) -> int:
        return 2 * self.Hk * self.K + self.Hv * self.V if self.D is None else self.D

    @property
    def window(self) -> int:
        return self.W - 1 if self.columns is None else self.columns

    @property
    def query_heads(self) -> int:
        return self.Hk if self.Hq is None else self.Hq

    @property
    def has_g(self) -> bool:
        return self.rule in ("gated", "gated_delta")

    @property
    def has_beta(self) -> bool:
        return self.rule in ("delta", "gated_delta")

    # ------------------------------------------------------------------------------ what to do

    def inputs(
        self,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        seed: int = 0,
    ) -> dict[str, Any]:
        """Keyword arguments of the public function.

        ``run`` converts two of them: ``checkpoints`` holds the keywords of ``Checkpoints``, and
        ``num_accepted`` of a verify is the argument of its commit.
        """
        return build.inputs(self, dtype, torch.device(device), seed)

    def expected(self, inputs: dict[str, Any], device: torch.device | str = "cpu") -> Expected:
        """The oracle's answer, and a copy of everything that the call must not change.

        ``device`` is where the oracle runs; a GPU is faster for long prompts.
        """
        host = {name: _moved(value, torch.device(device)) for name, value in inputs.items()}
        exact = _ORACLES[self.op](host)
        pools = {name: exact.pop(name) for name in POOLS if host.get(name) is not None}
        rows = self._written(host)
        dtype = _first(host).dtype
        return Expected(
            outputs={name: x for name, x in exact.items() if x is not None},
            pools={name: Pool(inputs[name], exact, rows) for name, exact in pools.items()},
            untouched=[(n, x, x.clone()) for n, x in _named_tensors(inputs) if n not in POOLS],
            dtype=dtype,
            limits=self.tolerances(dtype, _first(inputs).device),
        )

    def run(self, ops: Any, inputs: dict[str, Any], **options: Any) -> dict[str, Tensor]:
        """Call ``ops.<op>`` and return its results and pools by name.

        ``ops`` is the package itself, or anything with its names; ``options`` are further keywords
        of the public function, such as ``backend`` or ``out``.
        """
        kwargs = {**inputs, **options}
        if kwargs.get("checkpoints") is not None:
            kwargs["checkpoints"] = ops.Checkpoints(**kwargs["checkpoints"])
        pools = {name: inputs[name] for name in POOLS if inputs.get(name) is not None}
        if self.op == "verify":
            accepted = kwargs.pop("num_accepted")
            before = {name: whole_storage(pool).clone() for name, pool in pools.items()}
            if self.buffered:
                kwargs |= build.buffers(self, inputs, ops.DraftBuffers)
            o, draft = ops.verify(**kwargs)
            for name, pool in pools.items():
                what = f"{self.name}: {name} after verify, before commit"
                compare.assert_same_bits(whole_storage(pool), before[name], what)
            commit_options = {n: x for n, x in options.items() if n == "backend"}
            result: Any = o, ops.commit(draft, accepted, **commit_options)
        else:
            result = getattr(ops, self.op)(**kwargs)
        if self.op in (*DELTA_OPS, "causal_conv1d"):
            output, state = result
            if "state" in pools and not _same_memory(state, pools["state"]):
                raise AssertionError(f"{self.name}: the state returned is not the one passed")
            return {"y" if self.op in CONV_OPS else "o": output, "state": state, **pools}
        if self.op == "conv_qkv":
            named = zip(("q", "k", "v", "g", "beta"), result, strict=True)
            return {**{name: x for name, x in named if x is not None}, **pools}
        return {"y": result, **pools}

    def check(
        self,
        actual: dict[str, Tensor],
        expected: Expected,
        *,
        limits: dict[str, float] | None = None,
        same_dtype: dict[str, Tensor] | None = None,
    ) -> None:
        """Require correct outputs and written rows, and no change of any other byte.

        ``tolerances`` limit the errors; ``limits`` replaces some of them. With the result of a
        plain run on equal inputs as ``same_dtype``, errors may also be twice those of that run.
        """
        bounds = {**expected.limits, **(limits or {})}

        def judge(name: str, got: Tensor, exact: Tensor, plain: Tensor | None) -> None:
            what, per = f"{self.name}: {name}", self._head_dim(name)
            compare.assert_within(got, exact, bounds[name], name=what, per=per)
            if plain is not None:
                compare.assert_matches(got, exact, plain, name=what, per=per)

        for name, exact in expected.outputs.items():
            want = expected.dtype_of(name)
            if actual[name].dtype != want:
                raise AssertionError(f"{self.name}: {name}: {actual[name].dtype}, not {want}")
            judge(name, actual[name], exact, None if same_dtype is None else same_dtype[name])
        for name, pool in expected.pools.items():
            pool.assert_rest_unchanged(f"{self.name}: {name}")
            plain = None if same_dtype is None else same_dtype[name][pool.rows]
            judge(name, pool.tensor[pool.rows], pool.exact[pool.rows], plain)
        for name, tensor, before in expected.untouched:
            compare.assert_same_bits(tensor, before, f"{self.name}: input {name}")

    def tolerances(self, dtype: torch.dtype, device: torch.device | str) -> dict[str, float]:
        """The largest relative error of each output and pool, by name."""
        base = compare.tolerance(dtype, torch.float32, device)
        single = compare.tolerance(
            torch.float64 if dtype == torch.float64 else torch.float32, torch.float32, device
        )
        state = compare.tolerance(dtype, self.state_dtype, device)
        if self.op in CONV_OPS:
            state = single  # a window holds raw inputs in their own dtype
        return {
            **dict.fromkeys(("o", "y", "q", "k", "v"), base),
            **dict.fromkeys(("g", "beta"), single),  # float32, whatever the inputs' dtype
            "state": state,
            "conv_state": single,
        }

    def with_(self, **changes: Any) -> Case:
        """The same case with some fields changed, such as more tokens for a benchmark."""
        return replace(self, **changes)

    def bytes(self, dtype: torch.dtype = torch.bfloat16) -> int:
        """Bytes that must move at least: inputs and outputs, states read and written."""
        return counts.bytes_moved(self, dtype)

    def flops(self) -> int:
        """Floating-point operations of the recurrence; a multiply-add counts as two."""
        return counts.flops(self)

    def _head_dim(self, name: str) -> int | None:
        """The dimension of heads in an output or a pool, if it has one."""
        if name in ("o", "q", "k", "v"):
            return -3 if self.layout == "bhtd" else -2
        return 1 if name == "state" and self.op not in CONV_OPS else None

    def _written(self, host: dict[str, Any]) -> list[int]:
        """Rows of the pools that the call writes."""
        if self.op == "rms_norm_gated" or host.get("freeze"):
            return []
        accepted = host.get("num_accepted")
        spans = sequences(*self.grid, host.get("cu_seqlens"), accepted)
        pool = host.get("state")
        options = [host.get(name) for name in ("slots", "write_slots", "has_state")]
        pad_slot = host.get("pad_slot", -1)
        written: list[int] = []
        for row in live_rows(spans, pool, *options, pad_slot):
            written += [] if row.write is None else [row.write]
            written += [slot for slot in row.each if slot is not None]
            for slots in saves(host.get("checkpoints"), row, pad_slot).values():
                written += slots
        return sorted(written)


@dataclass(frozen=True)
class Pool:
    """A state pool, its required contents, and its whole storage before the call."""

    tensor: Tensor
    exact: Tensor
    rows: list[int]
    before: Tensor = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "before", whole_storage(self.tensor).clone())

    def assert_rest_unchanged(self, name: str) -> None:
        """Require unchanged bits outside the written rows, gaps between rows included."""
        storage = whole_storage(self.tensor)
        rest = torch.ones(storage.shape, dtype=torch.bool, device=storage.device)
        rest.as_strided(self.tensor.shape, self.tensor.stride())[self.rows] = False
        compare.assert_same_bits(storage[rest], self.before[rest], f"{name} outside written rows")


@dataclass(frozen=True)
class Expected:
    """Exact outputs by name, pools by name, and the inputs that no call may change."""

    outputs: dict[str, Tensor]
    pools: dict[str, Pool]
    untouched: list[tuple[str, Tensor, Tensor]]
    dtype: torch.dtype
    limits: dict[str, float]

    def dtype_of(self, name: str) -> torch.dtype:
        """float32 or float64 for gates and new states, the inputs' dtype for the rest."""
        if name in ("g", "beta", "state"):
            return torch.float64 if self.dtype == torch.float64 else torch.float32
        return self.dtype


def whole_storage(x: Tensor) -> Tensor:
    """All elements of the storage of ``x``, in one dimension."""
    size = x.untyped_storage().nbytes() // x.element_size()
    return x.as_strided((size,), (1,), 0)


def _delta(host: dict[str, Any]) -> dict[str, Any]:
    o, state = oracle.delta(**host)
    return {"o": o, "state": state}


def _verify(host: dict[str, Any]) -> dict[str, Any]:
    o, state, conv_state = oracle.verify_commit(**host)
    return {"o": o, "state": state, "conv_state": conv_state}


def _conv(host: dict[str, Any]) -> dict[str, Any]:
    y, state = oracle.conv(**host)
    return {"y": y, "state": state} if host.get("state") is not None else {"y": y}


def _conv_qkv(host: dict[str, Any]) -> dict[str, Any]:
    (q, k, v, g, beta), state = oracle.conv_qkv(**host)
    outputs = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    return {**outputs, "state": state} if host.get("state") is not None else outputs


def _norm(host: dict[str, Any]) -> dict[str, Any]:
    return {"y": oracle.rms_norm_gated(**host)}


def _step(host: dict[str, Any]) -> dict[str, Any]:
    y, conv_state, state = oracle.step(**host)
    return {"y": y, "conv_state": conv_state, "state": state}


_ORACLES = {
    "prefill": _delta,
    "decode": _delta,
    "verify": _verify,
    "causal_conv1d": _conv,
    "conv_qkv": _conv_qkv,
    "rms_norm_gated": _norm,
    "step": _step,
}


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return (a.data_ptr(), a.shape, a.stride()) == (b.data_ptr(), b.shape, b.stride())


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to(device)
    if isinstance(value, dict):
        return {name: _moved(x, device) for name, x in value.items()}
    if isinstance(value, tuple):
        return tuple(_moved(x, device) for x in value)
    return value


def _named_tensors(inputs: dict[str, Any]) -> list[tuple[str, Tensor]]:
    found = []
    for name, value in inputs.items():
        parts = value.values() if isinstance(value, dict) else value
        for part in parts if isinstance(value, (dict, tuple)) else [value]:
            found += [(name, part)] if isinstance(part, Tensor) else []
    return found


def _first(inputs: dict[str, Any]) -> Tensor:
    """The tensor that gives a call its dtype and device."""
    value = next(inputs[name] for name in ("v", "x", "qkvz") if name in inputs)
    return value if isinstance(value, Tensor) else value[0]
