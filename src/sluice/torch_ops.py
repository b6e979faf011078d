"""Every operator as a torch custom op: ``torch.ops.sluice.<op>``.

Its schema follows from the fields of the operator's spec: tensors, then options, then ``backend``.
It mutates its output buffers and states and returns nothing. Its fake implementation is the checks
of metadata.

An operator with gradients has two more, which mutate nothing and return what they make (an empty
tensor where there is nothing to make): ``<op>_functional``, which autograd follows, and
``<op>_backward``, which it calls. Both run below autograd and without autocast. Where torch traces
nothing, a ``torch.autograd.Function`` runs the same code without torch's dispatcher, which takes
longer than a small call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sluice import calls, dispatch, torch_private
from sluice.calls import Operator
from sluice.contract.errors import BackendError, SluiceError

_NO_NODE = (
    "{}: ONNX has no such operator; torch.onnx.export takes the module itself, not a program "
    "traced before (where it tried the module twice, the first error says why)"
)


def schema(op: Operator) -> str:
    """The operator's schema in torch's language."""
    arguments, letters = [], iter("abcdefghij")
    for name, kind in op.spec.FIELDS.items():
        kind = kind.replace("Meta", "Tensor").replace(" | None", "?")
        if name in op.mutates:
            kind = kind.replace("Tensor", f"Tensor({next(letters)}!)")
        arguments.append(f"{kind} {name}")
    return f"({', '.join(arguments)}, str? backend) -> ()"


def register(op: Operator) -> None:
    """Make the operator known, here and to torch."""
    calls.OPERATORS[op.name] = op
    width = len(op.spec.TENSORS)

    def implementation(*args: Any) -> None:
        calls.run(op, list(args[:width]), args[width:-1], calls.CANONICAL, args[-1])

    def fake(*args: Any) -> None:
        if torch.onnx.is_in_onnx_export():  # calls.py writes nodes; this comes from elsewhere
            raise SluiceError(_NO_NODE.format(op.name))
        metas = tuple(map(calls.meta_of, args[:width]))
        op.check(op.spec.make(op.name, metas, args[width:-1]))

    custom = torch.library.custom_op(
        f"sluice::{op.name}", implementation, mutates_args=op.mutates, schema=schema(op)
    )
    custom.register_fake(fake)


_NO_TRANSFORM = (
    "{}: no gradient is defined inside of torch.func; use backward() or torch.autograd.grad"
)
_GATES = ("dg", "dbeta")  # gradients of gates that conv_qkv makes: zeros where none comes


class Functional(NamedTuple):
    """An operator that autograd follows, and its backward."""

    op: Operator
    backward: Operator
    inputs: tuple[str, ...]
    """Tensors of the operator's spec that it takes. "state" is the initial state: it is copied."""
    results: tuple[str, ...]
    """Tensors of the operator's spec that it returns."""
    gradients: tuple[str, ...]
    """What the backward's spec calls the gradients of the results."""
    form: Any = None
    """The form of its calls; "given": a list of integers is an argument."""

    def __call__(
        self,
        tensors: Sequence[Tensor | None],
        options: tuple[Any, ...],
        form: list[int] | None,
        backend: str | None,
    ) -> list[Any]:
        """Its results for the tensors of a whole spec; None where there is nothing."""
        if not torch.compiler.is_compiling():  # which reads no ContextVar
            if torch_private.transform() is not None:
                raise SluiceError(_NO_TRANSFORM.format(self.op.name))
            backend = dispatch.forced() if backend is None else backend
        names = self.op.spec.TENSORS
        taken = [tensors[names.index(name)] for name in self.inputs]
        made = _way(f"{self.op.name}_functional", taken)(*taken, *options, form, backend)
        made = [made] if isinstance(made, Tensor) else made
        return [None if absent else x for x, absent in zip(made, self._absent(taken), strict=True)]

    def _absent(self, taken: Sequence[Any]) -> list[bool]:
        """Which results are absent: gates of conv_qkv that were not given."""
        given = dict(zip(self.inputs, taken, strict=True))
        source = {"g": "a", "beta": "b"} if "a" in self.inputs else {}
        return [name in source and given[source[name]] is None for name in self.results]


def register_functional(f: Functional) -> None:
    """Make an operator with gradients known to torch."""
    _register_backward(f.backward)
    op, spec = f.op, f.op.spec
    width, absent = len(f.inputs), f._absent

    def full(args: Sequence[Any]) -> tuple[list[Any], tuple[Any, ...], Any]:
        """The tensors of a whole spec, options and form."""
        given = dict(zip(f.inputs, args, strict=False))
        if given.get("state") is not None and "q" in given:  # a recurrent state is kept wide
            wide = torch.promote_types(args[0].dtype, torch.float32)
            given["state"] = given["state"].to(wide, copy=True).contiguous()
        elif given.get("state") is not None:
            given["state"] = given["state"].clone(memory_format=torch.contiguous_format)
        form = (*args[-2], False) if f.form == "given" else f.form
        return [given.get(name) for name in spec.TENSORS], tuple(args[width:-2]), form

    def results(tensors: Sequence[Any], args: Sequence[Any]) -> Any:
        made = [tensors[spec.TENSORS.index(name)] for name in f.results]
        first, gone = args[0], absent(args[:width])
        made = [first.new_empty(0) if no else x for x, no in zip(made, gone, strict=True)]
        return made[0] if len(made) == 1 else tuple(made)

    def implementation(*args: Any) -> Any:
        tensors, options, form = full(args)
        with _without_autocast(args[0]):
            return results(calls.run(op, tensors, options, form, args[-1]), args)

    def fake(*args: Any) -> Any:
        if torch.onnx.is_in_onnx_export():
            raise SluiceError(_NO_NODE.format(op.name))
        tensors, options, form = full(args)
        canonical = op.canonical(spec.Tensors(*tensors), options, form).tensors
        op.check(spec.make(op.name, tuple(map(calls.meta_of, canonical)), options))
        return results(canonical, args)

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs[:width])
        ctx.options, ctx.backend = inputs[width:-2], inputs[-1]
        made = (output,) if isinstance(output, Tensor) else output
        ctx.looks = [(x.shape, x.dtype, x.device) for x in made]
        ctx.set_materialize_grads(False)

    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        if torch.is_grad_enabled():  # create_graph
            raise SluiceError(f"{op.name} has first derivatives only, not with create_graph")
        known: dict[str, Any] = dict(zip(f.inputs, ctx.saved_tensors, strict=True))
        gone = absent([known[name] for name in f.inputs])
        fields = f.backward.spec.FIELDS
        for name, x, look, no in zip(f.gradients, grads, ctx.looks, gone, strict=True):
            if x is None and not no and (name in _GATES or "None" not in fields[name]):
                x = torch.zeros(look[0], dtype=look[1], device=look[2])
            known[name] = None if no or x is None else x.contiguous()
        options = dict(zip(spec.OPTIONS, ctx.options, strict=True))
        taken = [known.get(x) for x in f.backward.spec.TENSORS if x not in f.backward.mutates]
        chosen = [options[name] for name in f.backward.spec.OPTIONS]
        made = _way(f.backward.name, taken)(*taken, *chosen, ctx.backend)
        found = dict(zip(f.backward.mutates, made, strict=True))
        by_input = [None if known[x] is None else found.get(f"d{x}") for x in f.inputs]
        return (*by_input, *[None] * (len(spec.OPTIONS) + 2))

    options = [f"{spec.FIELDS[name].replace(' | None', '?')} {name}" for name in spec.OPTIONS]
    tensors = [f"Tensor{'?' if _optional(op, x) else ''} {x}" for x in f.inputs]
    returns = ", ".join(["Tensor"] * len(f.results))
    arguments = ", ".join([*tensors, *options, "int[]? form", "str? backend"])
    custom = torch.library.custom_op(
        f"sluice::{op.name}_functional",
        implementation,
        mutates_args=(),
        schema=f"({arguments}) -> {returns if len(f.results) == 1 else f'({returns})'}",
    )
    custom.register_fake(fake)
    custom.register_autograd(backward, setup_context=keep)
    _DIRECT[f"{op.name}_functional"] = _followed(op.name, implementation, keep, backward)


def _followed(name: str, run: Any, keep: Any, back: Any) -> Any:
    """What autograd follows where torch traces nothing; ``grad_fn`` has its name."""

    def forward(ctx: Any, *args: Any) -> Any:
        made = run(*args)
        keep(ctx, args, made)
        return made

    methods = {"forward": staticmethod(forward), "backward": staticmethod(back)}
    followed: Any = type(f"sluice_{name}", (torch.autograd.Function,), methods)
    return followed.apply


_DIRECT: dict[str, Any] = {}
"""Functional operators and backward ones, as they run where torch traces nothing."""


def _way(name: str, tensors: Sequence[Any]) -> Any:
    """How to call an operator: as a node of what torch traces, or directly."""
    traced = torch.compiler.is_compiling() or torch_private.dispatch_modes() > 0
    if traced or any(calls.without_data(x) for x in tensors if x is not None):
        return getattr(torch.ops.sluice, name)
    return _DIRECT[name]


def _register_backward(op: Operator) -> None:
    """A backward call as a function: inputs and gradients in, gradients out."""
    spec = op.spec
    inputs = [name for name in spec.TENSORS if name not in op.mutates]

    def full(args: Sequence[Any]) -> tuple[list[Any], tuple[Any, ...]]:
        given = dict(zip(inputs, args, strict=False))
        return [given.get(name) for name in spec.TENSORS], tuple(args[len(inputs) : -1])

    def results(tensors: Sequence[Any], like: Tensor) -> tuple[Tensor, ...]:
        made = [tensors[spec.TENSORS.index(name)] for name in op.mutates]
        return tuple(like.new_empty(0) if x is None else x for x in made)

    def implementation(*args: Any) -> tuple[Tensor, ...]:
        tensors, options = full(args)
        with _without_autocast(args[0]):
            try:
                return results(calls.run(op, list(tensors), options, None, args[-1]), args[0])
            except BackendError:  # the forward's backend has no such backward: choose another
                with dispatch.use_backend(None):
                    return results(calls.run(op, tensors, options, None, None), args[0])

    def fake(*args: Any) -> tuple[Tensor, ...]:
        tensors, options = full(args)
        return results(op.canonical(spec.Tensors(*tensors), options, None).tensors, args[0])

    _DIRECT[op.name] = implementation
    arguments = [
        f"{spec.FIELDS[x].replace('Meta', 'Tensor').replace(' | None', '?')} {x}"
        for x in (*inputs, *spec.OPTIONS)
    ]
    returns = ", ".join(["Tensor"] * len(op.mutates))
    custom = torch.library.custom_op(
        f"sluice::{op.name}",
        implementation,
        mutates_args=(),
        schema=f"({', '.join(arguments)}, str? backend) -> ({returns})",
    )
    custom.register_fake(fake)


def _optional(op: Operator, name: str) -> bool:
    return "None" in op.spec.FIELDS[name] or name in op.mutates


def _without_autocast(x: Tensor) -> Any:
    """A scope without autocast: products inside an operator keep their dtype."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.autocast(x.device.type, enabled=False)
    return contextlib.nullcontext()
