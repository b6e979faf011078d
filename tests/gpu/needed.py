"""What machine code calls need, and which of it is compiled beforehand. Nothing runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from sluice import calls
from sluice.backends import triton as portable
from sluice.backends.triton import variants
from sluice.calls import Checked
from tests.gpu.cross import bound


def serves(package: Any, spec: Any) -> Any:
    """The backend that has the operator: all but prefill is Triton's."""
    if spec.op not in package.OPS:
        return portable
    assert package.refuse(spec) is None, spec
    return package


def needed(package: Any, checked: Checked, device: torch.device) -> set[variants.Variant]:
    """What a call has to be compiled for; its tensors may begin anywhere."""
    spec, tensors = checked
    spec = spec.on(device)
    launches = bound(spec, serves(package, spec))
    begins = [0 if x is None else x.storage_offset() * x.element_size() for x in tensors]
    misplaced = frozenset(spec.TENSORS[i] for i in launches._checked if begins[i] % 16)
    return {variants.variant(call, misplaced) for call in launches.calls}


def checked(function: Any) -> list[Checked]:
    with calls.check_only() as found:
        function()
    return found


def compiled_for(package: Any, specs: Iterable[Any]) -> set[variants.Variant]:
    """What is compiled before calls of these specs, and such of other sizes, are made."""
    made = set()
    for spec in specs:
        by = serves(package, spec)
        made |= {variants.variant(c) for c, _ in portable.kernel_calls(by.__name__, by.OPS, [spec])}
    return made


def nearest(variant: variants.Variant, warm: set[variants.Variant]) -> object:
    """How a variant differs from the one most like it."""
    alike = [other for other in warm if other.kernel == variant.kernel]
    differences = [
        [
            (a, b)
            for a, b in zip(
                variant.parameters + variant.options, other.parameters + other.options, strict=False
            )
            if a != b
        ]
        for other in alike
    ]
    return variant.kernel.name, min(differences, key=len, default="not warm at all")
