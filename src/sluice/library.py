"""How a call runs: checked, dispatched, and, when torch traces it, as a torch custom op.

Data flows one way: public function (ops.py) -> ``call`` -> checks -> dispatch -> one backend's
function. Under ``torch.compile``, ``torch.export`` or any torch dispatch mode the call becomes one
node ``torch.ops.sluice.<op>``: its schema follows from the operator's containers, it mutates its
output buffers and states and returns nothing, and its fake implementation is the metadata checks.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor

from sluice import dispatch
from sluice.contract import checks, options, tensors, values
from sluice.contract.errors import SluiceError
from sluice.contract.problem import Problem
from sluice.settings import validating


class Operator(NamedTuple):
    """One operator: its containers, its checks, and the tensors it writes."""

    name: str
    tensors: type[Any]
    options: type[Any]
    check: Callable[[Any, Any], Problem]
    check_values: Callable[[Any, Any], None] | None
    mutates: tuple[str, ...]


def _delta(op: str, *mutates: str) -> Operator:
    def check(t: tensors.DeltaTensors, o: options.DeltaOptions) -> Problem:
        return checks.delta(op, t, o)

    return Operator(op, tensors.DeltaTensors, options.DeltaOptions, check, values.delta, mutates)


PREFILL = _delta("prefill", "state", "out")
DECODE = _delta("decode", "state", "out")
VERIFY = _delta("verify", "out", "draft_k", "draft_d", "draft_g")
COMMIT = Operator(
    "commit",
    tensors.CommitTensors,
    options.CommitOptions,
    checks.commit,
    values.commit,
    ("state", "conv_state"),
)
CAUSAL_CONV1D = Operator(
    "causal_conv1d",
    tensors.ConvTensors,
    options.ConvOptions,
    checks.conv,
    values.conv,
    ("state", "out"),
)
CONV_QKV = Operator(
    "conv_qkv",
    tensors.ConvQkvTensors,
    options.ConvOptions,
    checks.conv_qkv,
    values.conv,
    ("state", "q", "k", "v", "g", "beta"),
)
RMS_NORM_GATED = Operator(
    "rms_norm_gated", tensors.NormTensors, options.NormOptions, checks.norm, None, ("out",)
)
STEP = Operator(
    "step",
    tensors.StepTensors,
    options.StepOptions,
    checks.step,
    values.step,
    ("conv_state", "state", "out"),
)
OPERATORS = {
    op.name: op
    for op in (
        PREFILL,
        DECODE,
        VERIFY,
        COMMIT,
        CAUSAL_CONV1D,
        CONV_QKV,
        RMS_NORM_GATED,
        STEP,
    )
}

# a call asks these of torch every time: looked up once
_grad_enabled, _set_grad_enabled = torch.is_grad_enabled, torch._C._set_grad_enabled
_modes, _peek_transforms, _jit_trace = (
    torch._C._len_torch_dispatch_stack,
    torch._C._functorch.peek_interpreter_stack,
    torch._C._get_tracing_state,
)

_problems: dict[Any, Problem] = {}
_MOST_PROBLEMS = 4096
_LOWERING = "sluice.integrations.onnx.lower"  # by name: it stands on the operators


_probed: ContextVar[list[Problem] | None] = ContextVar("sluice_probed", default=None)


@contextlib.contextmanager
def probing() -> Iterator[list[Problem]]:
    """Calls in this scope are checked and their problems listed, but nothing runs.

    Tensors may be on the "meta" device.
    """
    problems: list[Problem] = []
    token = _probed.set(problems)
    try:
        yield problems
    finally:
        _probed.reset(token)


def call(op: Operator, t: Any, o: Any, backend: str | None = None) -> None:
    """Run a call whose tensors are canonical and whose outputs are allocated."""
    compiling = torch.compiler.is_compiling()  # asked first: a compiler cannot read a ContextVar
    if not compiling and (problems := _probed.get()) is not None:
        problems.append(problem_of(op, t, o))
    elif compiling and torch.onnx.is_in_onnx_export():
        importlib.import_module(_LOWERING).lower(op.name, t, o, backend)
    elif compiling or _traced(t[0]):
        getattr(torch.ops.sluice, op.name)(*_flat(t), *o, backend)
    else:
        run(op, t, o, backend)


def _traced(x: Tensor) -> bool:
    """Whether torch follows this call: in a dispatch mode, or on tensors without data."""
    if _modes() > 0 or x.is_meta:
        return True
    return type(x) is not Tensor and type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__


def run(op: Operator, t: Any, o: Any, backend: str | None) -> None:
    """Check, choose, and call the backend."""
    if _peek_transforms() is not None:
        raise SluiceError(_NO_GRADIENT.format(op.name))  # torch.func: its tensors have no data
    if _jit_trace() is not None:
        raise SluiceError(_NO_JIT.format(op.name))
    problem = problem_of(op, t, o)
    kernel = dispatch.select(problem, backend)
    # a compiled CPU kernel may look at values itself, and call these checks for their message
    looks = not getattr(kernel, "checks_values", False) and problem.device.type == "cpu"
    if (looks or validating()) and op.check_values is not None:
        op.check_values(problem, t)
    if not _grad_enabled():
        kernel(problem, t)
        return
    _set_grad_enabled(False)  # what no_grad() does, without its objects
    try:
        kernel(problem, t)
    finally:
        _set_grad_enabled(True)


def problem_of(op: Operator, t: Any, o: Any) -> Problem:
    """The checked problem, remembered by metadata: a serving loop checks each shape once.

    The very same object means the same shapes, strides, dtypes and options.
    """
    try:
        key = (
            op.name,
            o,
            *[x if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in _flat(t)],
        )
        problem = _problems.get(key)
    except (AttributeError, TypeError):  # not a tensor, or an option without a hash: named there
        op.check(t, o)
        raise
    if problem is None:
        problem = op.check(t, o)
        if len(_problems) >= _MOST_PROBLEMS:
            _problems.clear()
        _problems[key] = problem
    return problem


def wants_gradient(inputs: tuple[Tensor | None, ...]) -> bool:
    """Whether autograd would follow a call with these inputs."""
    if _grad_enabled():
        for x in inputs:
            if x is not None and x.requires_grad:
                return True
    return False


def without_gradient(op: str, output: Tensor, *inputs: Tensor | None) -> Tensor:
    """``output``, refusing a backward pass if any input wanted one: never a silent zero."""
    if not wants_gradient(inputs):
        return output
    wanted = [x for x in inputs if x is not None and x.requires_grad]
    if torch.compiler.is_compiling():
        if torch.onnx.is_in_onnx_export():
            return output  # a graph for inference: nobody can ask for a gradient
        raise SluiceError(_NO_GRADIENT.format(op))
    refused: Tensor = _NoGradient.apply(op, output, *wanted)
    return refused


_NO_JIT = (
    "{}: torch.jit.trace, which torch.onnx.export(dynamo=False) uses, would keep the results of "
    "this call as constants; use torch.export, torch.compile or torch.onnx.export(dynamo=True)"
)
_NO_NODE = (
    "{}: ONNX has no such operator; torch.onnx.export takes the module itself, not a program "
    "traced before (where it tried the module twice, the first error says why)"
)
_NO_GRADIENT = "{}: no gradient is defined; call it under torch.no_grad() or inference_mode()"


class _NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(op: str, output: Tensor, *inputs: Tensor) -> Tensor:
        return output.data  # not a view: a state that comes back is written in place again

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.op = inputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise SluiceError(_NO_GRADIENT.format(ctx.op))


def _flat(t: Any) -> list[Tensor | None]:
    """A container's tensors in the order of the schema, the index tensors in place."""
    at = _ROWS_AT.get(type(t))
    return list(t) if at is None else [*t[:at], *t[at], *t[at + 1 :]]


_ROWS_AT = {
    op.tensors: op.tensors._fields.index("rows")
    for op in OPERATORS.values()
    if "rows" in op.tensors._fields
}


_KINDS = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    float: "float",
    float | None: "float?",
    int: "int",
    bool: "bool",
    str: "str",
    str | None: "str?",
}


def _fields(kind: type[Any]) -> list[tuple[str, Any]]:
    """Names and types of a container's fields, the index tensors in place."""
    fields: list[tuple[str, Any]] = []
    for name, hint in get_type_hints(kind).items():
        fields.extend(_fields(tensors.Rows) if hint is tensors.Rows else [(name, hint)])
    return fields


def _register(op: Operator) -> None:
    """Define ``torch.ops.sluice.<op>`` with its fake implementation."""
    arguments, letters = [], iter("abcdefghij")
    for name, hint in _fields(op.tensors):
        kind = _KINDS[hint]
        if name in op.mutates:
            kind = kind.replace("Tensor", f"Tensor({next(letters)}!)")
        arguments.append(f"{kind} {name}")
    arguments += [f"{_KINDS[hint]} {name}" for name, hint in _fields(op.options)]
    schema = f"({', '.join(arguments)}, str? backend) -> ()"
    width = len(_fields(op.tensors))

    def unflatten(args: tuple[Any, ...]) -> tuple[Any, Any]:
        flat = iter(args[:width])
        parts = [
            tensors.Rows(*(next(flat) for _ in tensors.Rows._fields))
            if hint is tensors.Rows
            else next(flat)
            for hint in get_type_hints(op.tensors).values()
        ]
        return op.tensors(*parts), op.options(*args[width:-1])

    def implementation(*args: Any) -> None:
        run(op, *unflatten(args), args[-1])

    def fake(*args: Any) -> None:
        if torch.onnx.is_in_onnx_export():  # ``call`` writes nodes; this comes from elsewhere
            raise SluiceError(_NO_NODE.format(op.name))
        op.check(*unflatten(args))

    custom = torch.library.custom_op(
        f"sluice::{op.name}", implementation, mutates_args=op.mutates, schema=schema
    )
    custom.register_fake(fake)


for _operator in OPERATORS.values():
    _register(_operator)
