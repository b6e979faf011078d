"""After ``sluice warmup`` no call of its kinds compiles a kernel, whatever its size (row 10).

Nothing is compiled or launched here. Which kernel a launch needs follows from its arguments alone:
constants, dtypes, and what Triton makes a kernel know of a number. test_prefill_promises.py makes
the same calls on a GPU, and counts kernels.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
pytest.importorskip("triton.experimental.gluon.nvidia.hopper")

from sluice import dispatch, library, ops
from sluice.backends import hopper
from sluice.backends import triton as portable
from sluice.backends.hopper import prefill as hopper_prefill
from sluice.backends.triton import launch
from sluice.backends.triton import prefill as portable_prefill
from sluice.contract import values
from sluice.layers import QwenShape
from tests.gpu.sizes import Sliced, serve, serve_layer, warmup

pytestmark = pytest.mark.skipif(portable.interpreted(), reason="kernels have no signature there")

HEADS = [(16, 32), (8, 16), (4, 8), (2, 4), (1, 3), (16, 48), (16, 64)]
CPU = torch.device("cpu")


def known(kernel: Any, name: str, x: Any) -> Any:
    """What the compiler is told of an argument."""
    param = kernel.params[kernel.arg_names.index(name)]
    if param.is_constexpr or x is None:
        return repr(x)
    if isinstance(x, Tensor):
        free = param.do_not_specialize or param.do_not_specialize_on_alignment
        return x.dtype, not free and x.data_ptr() % 16 == 0
    if isinstance(x, float):
        return float
    if not isinstance(x, int):  # a descriptor
        return x.base.dtype, tuple(x.block_shape), repr(x.layout)
    size = "i32" if -(2**31) <= x < 2**31 else "i64"
    if param.do_not_specialize:
        return size
    return size, x == 1, x % 16 == 0 and not param.do_not_specialize_on_alignment


class Kernels:
    """Stands in for ``launch.run``: the kernels that have been needed."""

    def __init__(self) -> None:
        self.needed: dict[Any, str] = {}
        self.call = ""

    def begin(self, call: str) -> None:
        self.call = call

    def run(self, kernel: Any, programs: int, arguments: dict[str, Any], options: Any) -> None:
        told = tuple(sorted((name, known(kernel, name, x)) for name, x in arguments.items()))
        key = kernel.__name__, repr(told), repr(sorted(options.items(), key=str))
        self.needed.setdefault(key, self.call)


@pytest.fixture(autouse=True)
def _nothing_is_clean():
    """Nothing is computed here, and to fill gigabytes would take long."""


@contextlib.contextmanager
def anywhere(_: object) -> Iterator[None]:
    yield


@pytest.fixture
def kernels(request, monkeypatch) -> Kernels:
    """An H200 with this backend's prefill."""
    kernels = Kernels()
    monkeypatch.setattr(launch, "run", lambda *launched: kernels.run(*launched))
    monkeypatch.setattr(portable_prefill, "processors", lambda _: 132)
    monkeypatch.setattr(portable_prefill, "_has_wgmma", lambda _: True)
    monkeypatch.setattr(portable_prefill, "_shared_memory", lambda _: 227 << 10)
    monkeypatch.setattr(hopper_prefill, "_reachable", lambda _: True)
    monkeypatch.setattr(torch.cuda, "device", anywhere)
    monkeypatch.setattr(values, "_finite", lambda *_: None)
    hoppers = hopper.OPS if request.param == "hopper" else {}

    def chosen(p: Any, _: object = None) -> Any:
        return (hopper if p.op in hoppers else portable).kernel(p.op)

    monkeypatch.setattr(dispatch, "select", chosen)
    launch.forget()
    library._problems.clear()
    yield kernels
    launch.forget()
    library._problems.clear()


class Untouched(warmup.Forms):
    """Tensors are memory that nobody touches."""

    def zeros(self, *size: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(*size, dtype=dtype or self.kinds.dtype)


class UntouchedSlices(Sliced, Untouched):
    """Both."""


@pytest.mark.parametrize("heads", HEADS, ids=lambda heads: f"{heads[0]}_{heads[1]}")
@pytest.mark.parametrize("kernels", ["hopper", "triton"], indirect=True)
def test_row_10_a_call_of_any_size_needs_no_kernel_that_warmup_has_not_compiled(kernels, heads):
    shape = QwenShape("a model", 64, *heads, 4, (0, 1, 2))
    forms = Untouched(shape, torch.device("cuda"), warmup.Kinds())
    todo = list(forms.all())
    forms.device = CPU
    with launch.warming([]):
        for form in todo:
            arguments, options = form.make()
            getattr(ops, form.op)(*arguments, **options)
    warm = dict(kernels.needed)
    serve(forms, kernels.begin)
    serve(UntouchedSlices(shape, CPU, forms.kinds), kernels.begin)
    serve_layer(forms, kernels.begin)
    missing = {key: call for key, call in kernels.needed.items() if key not in warm}
    assert not missing, {(key[0], call): nearest(key, warm) for key, call in missing.items()}


def nearest(key: tuple[str, ...], warm: dict[Any, str]) -> object:
    """What of a kernel differs from the one most like it."""
    split = [set(part.split("), (")) for part in key]
    return min(
        ([a - set(b.split("), (")) for a, b in zip(split, w, strict=True)] for w in warm),
        key=lambda differences: sum(map(len, differences)),
    )
