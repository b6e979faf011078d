"""Every operator as a torch custom op: ``torch.ops.sluice.<op>``.

Its schema follows from the fields of the operator's spec: tensors, then options, then ``backend``.
It mutates its output buffers and states and returns nothing. Its fake implementation is the checks
of metadata.
"""

from __future__ import annotations

from typing import Any

import torch

from sluice import calls
from sluice.calls import Operator
from sluice.contract.errors import SluiceError

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
