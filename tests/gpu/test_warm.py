"""After ``sluice warmup`` no call of its kinds compiles a kernel, whatever its size (row 10).

Nothing is compiled or launched here. Which machine code a launch needs follows from its spec alone
(``variants.variant``), and from which tensors do not begin at a multiple of 16 bytes.
test_prefill_promises.py makes the same calls on a GPU, and counts kernels.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("triton.experimental.gluon.nvidia.hopper")

from sluice.backends import hopper
from sluice.backends import triton as portable
from sluice.backends.triton import variants
from sluice.layers import QwenShape
from sluice.model_calls import Kinds, ModelCalls
from tests.gpu.cross import bound, gpu_like
from tests.gpu.needed import checked, compiled_for, nearest, needed, serves
from tests.gpu.sizes import Sliced, every_size, kept_states, run_layer

pytestmark = pytest.mark.skipif(portable.interpreted(), reason="kernels have no signature there")

warmup = importlib.import_module("sluice.warmup")  # the module, not the function
HEADS = [(16, 32), (8, 16), (4, 8), (2, 4), (1, 3), (16, 16), (16, 48), (16, 64)]


@pytest.fixture(autouse=True)
def _nothing_is_clean():
    """Nothing is computed here, and to fill gigabytes would take long."""


@pytest.fixture
def package(request) -> Iterator[Any]:
    """An H200 with this backend's prefill."""
    with gpu_like("sm_90"):
        yield {"hopper": hopper, "triton": portable}[request.param]


@pytest.mark.parametrize("heads", HEADS, ids=lambda heads: f"{heads[0]}_{heads[1]}")
@pytest.mark.parametrize("package", ["hopper", "triton"], indirect=True)
def test_row_10_a_call_of_any_size_needs_no_kernel_that_warmup_has_not_compiled(package, heads):
    shape, device = QwenShape("a model", 64, *heads, 4, (0, 1, 2)), torch.device("cuda", 0)
    forms = warmup.forms(shape, 1, device, Kinds())
    warm = compiled_for(package, (form.spec(device) for form in forms))
    missing: dict[variants.Variant, str] = {}
    sliced = 0
    for model in (ModelCalls(shape), Sliced(shape)):
        for call in every_size(model):
            (found,) = checked(call.run)
            sliced += any(x is not None and x.storage_offset() for x in found.tensors)
            for variant in needed(package, found, device) - warm:
                missing.setdefault(variant, call.name)
    assert sliced > 500
    for found in checked(lambda: run_layer(ModelCalls(shape, device="cpu"))):
        for variant in needed(package, found, device) - warm:
            missing.setdefault(variant, f"layer: {found.spec.op}")
    assert not missing, [(call, nearest(v, warm)) for v, call in missing.items()]


@pytest.mark.parametrize("package", ["hopper", "triton"], indirect=True)
def test_row_10_nor_does_a_call_with_checkpoints(package):
    """``sluice warmup --checkpoints``."""
    shape, device = QwenShape("a model", 64, 4, 8, 4, (0, 1, 2)), torch.device("cuda", 0)
    warm: dict[bool, set[variants.Variant]] = {}
    for kept in (False, True):
        specs = [f.spec(device) for f in warmup.forms(shape, 1, device, Kinds(), checkpoints=kept)]
        warm[kept] = compiled_for(package, specs)
    missing = {kept: set[variants.Variant]() for kept in warm}
    for model in (ModelCalls(shape), Sliced(shape)):
        for call in kept_states(model):
            (found,) = checked(call.run)
            for kept, variant in product(warm, needed(package, found, device)):
                if variant not in warm[kept]:
                    missing[kept].add(variant)
    assert missing[False]
    assert not missing[True], [nearest(v, warm[True]) for v in missing[True]]


@pytest.mark.parametrize("package", ["hopper", "triton"], indirect=True)
def test_a_kernel_that_warmup_leaves_out_is_missed(package):
    """The test above can fail: the kernels of one size alone do not serve every size."""
    shape, device = QwenShape("a model", 64, 2, 4, 4, (0, 1, 2)), torch.device("cuda", 0)
    spec = ModelCalls(shape).call("prefill", "", 1, 1 << 18, True).spec(device)
    assert serves(package, spec) is package
    forms = [f for f in warmup.forms(shape, 1, device, Kinds()) if f.op == "prefill"]
    specs = [form.spec(device) for form in forms]
    every = {
        variants.variant(c) for c, _ in portable.kernel_calls(package.__name__, package.OPS, specs)
    }
    alone = {variants.variant(c) for spec in specs for c in bound(spec, package).calls}
    assert alone < every
    assert {variants.variant(c) for c in bound(spec, package).calls} <= every
    assert not {variants.variant(c) for c in bound(spec, package).calls} <= alone
