"""How a call runs: public function -> ``call`` -> ``_bind``, once per metadata -> ``launch``.

``call`` reads the metadata of the tensors: shapes, strides, dtypes, devices. If an earlier call had
the same, its launch is in the cache: outputs are allocated, and the launch runs. Otherwise
``_bind`` brings the description into canonical form, checks it, chooses a backend and lets it bind.
``BINDINGS`` holds them. Nothing in it refers to a tensor.

When torch traces the call (``torch.compile``, ``torch.export``, a dispatch mode, tensors without
data), it becomes one node ``torch.ops.sluice.<op>`` instead (``torch_ops.py``).
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sluice import dispatch, open_drafts, torch_private
from sluice.contract import require
from sluice.contract.errors import ContractError, SluiceError
from sluice.contract.meta import Meta, apart
from sluice.contract.spec import Spec
from sluice.kept import Kept
from sluice.settings import validating

CANONICAL = "canonical"
"""The form of a call whose tensors are canonical and whose outputs are there."""
STATES = ("state", "conv_state")
"""Tensors that a call reads and writes."""
BINDINGS = Kept(16384)
"""A serving process sees some hundred combinations of shapes; each takes 4 to 6 KB on a CPU."""


class Operator(NamedTuple):
    """One operator: how its arguments become a spec, and what is checked."""

    name: str
    spec: type[Spec]
    canonical: Callable[[Any, Any, Any], Canonical]
    """``(tensors or metas, options, form)`` -> the same in canonical form, outputs allocated."""
    check: Callable[[Any], None]
    check_values: Callable[[Any, Any], None] | None
    mutates: tuple[str, ...]
    """The tensors it writes."""
    arguments: tuple[tuple[str, str], ...] = ()
    """What the caller calls a tensor, where that is not the field's name."""


class Canonical(NamedTuple):
    """A call in canonical form, and how results return to the caller's layout."""

    tensors: tuple[Any, ...]
    restore: Callable[[Any], Any] | None = None
    results: tuple[str, ...] = ()
    """The tensors that ``restore`` is for, where the caller gave none."""
    zeros: tuple[str, ...] = ()
    """Tensors that begin as zeros, where the caller gave none."""


class Output(NamedTuple):
    """A tensor that a call makes because the caller gave none."""

    place: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    zeros: bool
    like: int | None
    """A tensor of the call that looks the same: made like it, the output costs half the time."""
    kin: int | None
    """A tensor of the call with the same dtype and device: made by it, it costs less too."""


class Bound(NamedTuple):
    """A call whose metadata is known: all that is left is addresses."""

    spec: Spec
    outputs: tuple[Output, ...]
    choice: dispatch.Choice
    buffers: Buffers | None = None
    """Those that the caller gave for results, if any."""


_only_checked: ContextVar[list[Checked] | None] = ContextVar("sluice_only_checked", default=None)


class Checked(NamedTuple):
    """A call that was only checked: its spec, and the tensors it came with."""

    spec: Any
    tensors: Sequence[Tensor | None]


@contextlib.contextmanager
def check_only() -> Iterator[list[Checked]]:
    """Calls in this scope are checked and listed, but nothing runs.

    Tensors may be on the "meta" device.
    """
    found: list[Checked] = []
    token = _only_checked.set(found)
    try:
        with torch.no_grad():  # or autograd would follow the call, and run it
            yield found
    finally:
        _only_checked.reset(token)


def call(
    op: Operator,
    tensors: list[Tensor | None],
    options: tuple[Any, ...],
    form: Any = None,
    backend: str | None = None,
) -> list[Any]:
    """Run a call. ``tensors`` and ``options`` are in the order of the operator's spec.

    Args:
        form: what else the operator's ``canonical`` needs to know; hashable.

    Returns:
        the tensors, including those that were not given and had to be made.
    """
    if torch.compiler.is_compiling():  # asked first: a compiler cannot read a ContextVar
        return _traced(op, tensors, options, form, backend)
    if (found := _only_checked.get()) is not None:
        bound = _described(op, tensors, options, form)
        found.append(Checked(bound[0], tensors))
        return _allocated(tensors, bound[1])
    first = tensors[0]
    if torch_private.dispatch_modes() > 0 or type(first) is not Tensor or first.is_meta:
        _tensors_only(op, tensors)
        if _follows(first):
            return _traced(op, tensors, options, form, backend)
    return run(op, tensors, options, form, backend)


def run(
    op: Operator,
    tensors: list[Tensor | None],
    options: tuple[Any, ...],
    form: Any = None,
    backend: str | None = None,
) -> list[Any]:
    """Find or make the binding, allocate outputs, launch."""
    if torch_private.transform() is not None:
        raise SluiceError(NO_GRADIENT.format(op.name))  # torch.func: its tensors have no data
    if torch_private.jit_trace() is not None:
        raise SluiceError(_NO_JIT.format(op.name))
    if backend is None:
        backend = dispatch.forced()
    try:
        metas = tuple(
            [None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in tensors]
        )
        key = op.name, form, options, metas, backend
        bound = BINDINGS.get(key)
        if bound is None:
            bound = _bind(op, form, options, metas, backend)
            BINDINGS.keep(key, bound)
    except (AttributeError, TypeError):  # not a tensor, or an option without a hash
        _tensors_only(op, tensors)
        dispatch.known(backend)
        _describe(op, tuple(map(meta_of, tensors)), options, form)  # names what is wrong
        raise
    try:
        for i, shape, strides, dtype, device, zeros, like, kin in bound.outputs:
            if like is not None:
                tensors[i] = torch.empty_like(tensors[like])  # type: ignore[arg-type]
            elif kin is not None:
                tensors[i] = tensors[kin].new_empty_strided(shape, strides)  # type: ignore[union-attr]
            else:
                x = torch.empty_strided(shape, strides, dtype=dtype, device=device)
                tensors[i] = x.zero_() if zeros else x
        choice = bound.choice
        if choice.special or validating():
            choice = choice.ready(tensors, validating())
        if bound.buffers is not None and not choice.watches:
            bound.buffers({i: tensors[i].data_ptr() for i in bound.buffers.places})  # type: ignore[union-attr]
        choice.launch(tensors)
    except RuntimeError:
        _dense_only(op, tensors)
        raise
    if open_drafts.opened:
        open_drafts.note(bound.spec, tensors)
    return tensors


def _bind(
    op: Operator, form: Any, options: tuple[Any, ...], metas: tuple[Any, ...], backend: str | None
) -> Bound:
    described = tuple(None if m is None else Meta(*m) for m in metas)
    spec, outputs = _describe(op, described, options, form)
    choice = dispatch.choose(spec, backend, op.check_values)
    buffers = Buffers(op, described)
    if not buffers.pairs:
        return Bound(spec, outputs, choice)
    choice.watch(buffers)
    return Bound(spec, outputs, choice, buffers)


class Buffers:
    """Tensors that the caller gave for results: each lies apart from the call's other tensors.

    Called with the addresses of the call's tensors, it raises where two of them overlap. Tensors of
    one dimension, which are parameters and indices, are left out to keep calls quick.
    """

    def __init__(self, op: Operator, given: tuple[Meta | None, ...]) -> None:
        self.op, self.given = op, given
        names, there = op.spec.TENSORS, [(i, x) for i, x in enumerate(given) if x is not None]
        results = [
            (i, x.reach()) for i, x in there if names[i] in op.mutates and names[i] not in STATES
        ]
        large = [(i, x.reach()) for i, x in there if x.dim() > 1] if results else []
        known = {frozenset((i, j)): (i, n, j, m) for i, n in results for j, m in large if i != j}
        self.pairs = [pair for pair in known.values() if pair[1] > 0 < pair[3]]
        self.places = sorted({i for a, _, b, _ in self.pairs for i in (a, b)})

    def __call__(self, addresses: Sequence[int] | dict[int, int]) -> None:
        for i, reach, j, other in self.pairs:
            distance = addresses[j] - addresses[i]
            if -other < distance < reach:
                self._look(i, j, distance)

    def _look(self, i: int, j: int, distance: int) -> None:
        a, b = self.given[i], self.given[j]
        assert a is not None
        assert b is not None
        if not apart(a, b, distance):
            names = [dict(self.op.arguments).get(x, x) for x in self.op.spec.TENSORS]
            expected = f"memory of its own, apart from {names[j]}"
            raise ContractError(self.op.name, names[i], expected, "memory that both use")


def forget() -> None:
    """Forget all bindings: for tests and sweeps that change what a binding depends on."""
    BINDINGS.clear()


dispatch.when_a_backend_gives_up.append(forget)


def _described(
    op: Operator, tensors: Sequence[Tensor | None], options: tuple[Any, ...], form: Any
) -> tuple[Any, tuple[Output, ...]]:
    _tensors_only(op, tensors)
    return _describe(op, tuple(map(meta_of, tensors)), options, form)


def _describe(
    op: Operator, given: tuple[Meta | None, ...], options: tuple[Any, ...], form: Any
) -> tuple[Any, tuple[Output, ...]]:
    """The checked spec, and the tensors to make."""
    require.options(op.name, op.spec.FIELDS, dict(zip(op.spec.OPTIONS, options, strict=True)))
    canonical = Canonical(given)
    if form != CANONICAL:
        canonical = op.canonical(op.spec.Tensors(*given), options, form)
    spec = op.spec.make(op.name, canonical.tensors, options)
    op.check(spec)
    outputs, there = [], dict(enumerate(given))
    for i, (name, before, after) in enumerate(
        zip(op.spec.TENSORS, given, canonical.tensors, strict=True)
    ):
        if before is None and after is not None:
            if canonical.restore is not None and name in canonical.results:
                after = canonical.restore(after)
            zeros = name in canonical.zeros
            like = kin = None
            for j, x in there.items():
                if x is not None and not zeros and x[2:] == after[2:]:
                    kin = j
                    if x == after and after.is_dense():
                        like = j
            shape, strides, dtype, device = after
            outputs.append(Output(i, shape, strides, dtype, device, zeros, like, kin))
            there[i] = after
    return spec, tuple(outputs)


def _allocated(tensors: list[Tensor | None], outputs: Sequence[Output]) -> list[Any]:
    """The tensors of a call that was only checked. Its outputs may go into another such call."""
    for made in outputs:
        tensors[made.place] = torch.empty_strided(
            made.shape, made.strides, dtype=made.dtype, device=made.device
        )
    return tensors


def meta_of(x: Tensor | None) -> Meta | None:
    """What a tensor looks like."""
    return None if x is None else Meta(x.shape, x.stride(), x.dtype, x.device)


def _tensors_only(op: Operator, tensors: Sequence[object]) -> None:
    for name, x in zip(op.spec.TENSORS, tensors, strict=True):
        optional = "None" in op.spec.FIELDS[name] or name in op.mutates
        if not isinstance(x, Tensor) and not (x is None and optional):
            raise ContractError(op.name, dict(op.arguments).get(name, name), "a tensor", _kind(x))


def _dense_only(op: Operator, tensors: Sequence[Tensor | None]) -> None:
    """Name a tensor that has no memory of the usual kind: it has strides, but no address."""
    for name, x in zip(op.spec.TENSORS, tensors, strict=True):
        if x is not None and x.layout != torch.strided:
            argument = dict(op.arguments).get(name, name)
            raise ContractError(op.name, argument, "a dense tensor", str(x.layout)[6:])


def _kind(x: object) -> str:
    return type(x).__name__


def _follows(x: Any) -> bool:
    """Whether torch traces a call with this tensor: in a dispatch mode, or without data."""
    return torch_private.dispatch_modes() > 0 or without_data(x)


def without_data(x: Any) -> bool:
    """Whether a tensor has no data of its own, or a class of its own decides what a call does."""
    if type(x) is Tensor:
        return bool(x.is_meta)
    return x.is_meta or type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__


_LOWERING = "sluice.integrations.onnx.lower"  # imported by name: it is built on the operators


def _traced(
    op: Operator,
    tensors: list[Tensor | None],
    options: tuple[Any, ...],
    form: Any,
    backend: str | None,
) -> list[Any]:
    """The call as one node of what torch traces."""
    given = list(tensors)
    canonical = op.canonical(op.spec.Tensors(*tensors), options, form)
    if torch.compiler.is_compiling() and torch.onnx.is_in_onnx_export():
        importlib.import_module(_LOWERING).lower(op, canonical.tensors, options, backend)
    else:
        getattr(torch.ops.sluice, op.name)(*canonical.tensors, *options, backend)
    for i, name in enumerate(op.spec.TENSORS):
        if given[i] is None:
            made = canonical.tensors[i]
            restored = canonical.restore is not None and name in canonical.results
            given[i] = canonical.restore(made) if restored and made is not None else made  # type: ignore[misc]
    return given


def wants_gradient(*inputs: Tensor | None) -> bool:
    """Whether autograd would follow a call with these inputs."""
    if torch.is_grad_enabled():
        for x in inputs:
            if isinstance(x, Tensor) and x.requires_grad:
                return not (torch.compiler.is_compiling() and torch.onnx.is_in_onnx_export())
    return False  # nor for a graph of ONNX: nobody can ask it for a gradient


def without_gradient(op: str, output: Tensor, *inputs: Tensor | None) -> Tensor:
    """``output``, refusing a backward pass if any input wanted one: never a silent zero."""
    if not wants_gradient(*inputs):
        return output
    wanted = [x for x in inputs if x is not None and x.requires_grad]
    if torch.compiler.is_compiling():
        raise SluiceError(NO_GRADIENT.format(op))
    refused: Tensor = _NoGradient.apply(op, output, *wanted)
    return refused


_NO_JIT = (
    "{}: torch.jit.trace, which torch.onnx.export(dynamo=False) uses, would keep the results of "
    "this call as constants; use torch.export, torch.compile or torch.onnx.export(dynamo=True)"
)
NO_GRADIENT = (
    "{}: no gradient is defined through tensors that are written in place (state, out); to train, "
    "use prefill, causal_conv1d and conv_qkv with initial_state or no state; to serve, call it "
    "under torch.no_grad() or inference_mode()"
)


class _NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(op: str, output: Tensor, *inputs: Tensor) -> Tensor:
        return output.data  # not a view: a state that comes back is written in place again

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.op = inputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise SluiceError(NO_GRADIENT.format(ctx.op))


OPERATORS: dict[str, Operator] = {}
"""Every operator by name; ``ops`` registers them."""
