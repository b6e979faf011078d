"""The kernels of ``transitions`` compile for GPUs that are not here, and fit.

Those of the parallel half are prefill's; test_prefill_compile.py and test_hopper.py compile them.
"""

from __future__ import annotations

import functools

import pytest
import torch

pytest.importorskip("triton")

from sluice.backends import hopper
from sluice.backends import triton as portable
from sluice.backends.triton import interpreted
from sluice.ops.transitions import transitions
from tests.gpu.cross import SHARED, bound, compile_for, gpu_like, resources, specs_of

pytestmark = [
    pytest.mark.skipif(interpreted(), reason="the interpreter does not compile"),
    pytest.mark.slow,
]
HK, HV, K = 2, 4, 128
SERIAL = ("hopper_state_kernel", "prefill_segments_kernel", "chain_kernel")


def launched(package, target, segment=1024, **options):
    """The launches of 4,000 tokens."""
    zeros = functools.partial(torch.zeros, device="meta")
    tokens = functools.partial(zeros, 1, 4000, dtype=torch.bfloat16)
    gates = zeros(1, 4000, HV), zeros(1, 4000, HV)
    with gpu_like(target) as device:
        (spec,) = specs_of(
            lambda: transitions(tokens(HK, K), tokens(HV, K), *gates, segment=segment, **options),
            device,
        )
        return bound(spec, package).calls


@pytest.mark.parametrize(
    ("package", "target"),
    [
        pytest.param(hopper, "sm_90", id="hopper"),
        pytest.param(portable, "sm_90", id="sm_90"),
        pytest.param(portable, "sm_80", id="sm_80", marks=pytest.mark.long),
        pytest.param(portable, "sm_120", id="sm_120", marks=pytest.mark.long),
    ],
)
def test_the_serial_kernels_of_transitions_fit_without_spills(package, target):
    found = [call for call in launched(package, target) if call.kernel.name in SERIAL]
    assert {call.kernel.name for call in found} >= {"chain_kernel"}
    for call in found:
        used = resources(compile_for(call, target))
        assert used.spills == 0, f"{call.kernel.name}: {used}"
        assert used.shared <= 1024 * SHARED[target], f"{call.kernel.name}: {used}"


@pytest.mark.parametrize("package", [hopper, portable])
def test_every_segment_has_its_programs_and_one_needs_no_chain(package):
    """Four segments, the last of 928 tokens: two programs of 128 columns for each and head."""
    serial = [c for c in launched(package, "sm_90") if c.kernel.name in SERIAL[:2]]
    assert {call.programs for call in serial} == {4 * HV * 2}
    assert all(call.arguments["EVERY"] for call in serial)
    whole = launched(package, "sm_90", segment=4032)
    assert "chain_kernel" not in [call.kernel.name for call in whole]
    serial = [c for c in whole if c.kernel.name in SERIAL[:2]]
    assert {call.arguments["segments_ptr"].source for call in serial} == {"state"}
