"""The kernels of the first of two passes compile for GPUs that are not here, and fit.

All others are prefill's: test_prefill_compile.py and test_hopper.py compile them.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("triton")

from sluice.backends import hopper, module_of
from sluice.backends import triton as portable
from sluice.backends.triton import interpreted
from tests.gpu.cross import SHARED, bound, compile_for, gpu_like, resources
from tests.gpu.passes import HV, first_pass, specs

pytestmark = [
    pytest.mark.skipif(interpreted(), reason="the interpreter does not compile"),
    pytest.mark.slow,
]
SERIAL = ("hopper_state_kernel", "prefill_segments_kernel", "chain_kernel")


@pytest.mark.parametrize(
    ("package", "target"),
    [
        pytest.param(hopper, "sm_90", id="hopper"),
        pytest.param(portable, "sm_90", id="sm_90"),
        pytest.param(portable, "sm_80", id="sm_80", marks=pytest.mark.long),
        pytest.param(portable, "sm_120", id="sm_120", marks=pytest.mark.long),
    ],
)
def test_the_serial_kernels_of_the_first_pass_fit_without_spills(package, target):
    found = [call for call in first_pass(package, target) if call.kernel.name in SERIAL]
    assert {call.kernel.name for call in found} >= {"chain_kernel"}
    for call in found:
        used = resources(compile_for(call, target))
        assert used.spills == 0, f"{call.kernel.name}: {used}"
        assert used.shared <= 1024 * SHARED[target], f"{call.kernel.name}: {used}"


@pytest.mark.parametrize("package", [hopper, portable])
def test_every_segment_has_its_programs_and_one_needs_no_chain(package):
    """Four segments, the last of 928 tokens: two programs of 128 columns for each and head."""
    serial = [c for c in first_pass(package, "sm_90") if c.kernel.name in SERIAL[:2]]
    assert {call.programs for call in serial} == {4 * HV * 2}
    assert all(call.arguments["EVERY"] for call in serial)
    whole = first_pass(package, "sm_90", segment=4032)
    assert "chain_kernel" not in [call.kernel.name for call in whole]
    serial = [c for c in whole if c.kernel.name in SERIAL[:2]]
    assert {call.arguments["segments_ptr"].source for call in serial} == {"map"}


@pytest.mark.parametrize("package", [hopper, portable])
def test_both_passes_together_are_a_split_prefill_with_a_chain(package):
    """The same kernels, and the second pass has the workspace of the first, to the byte."""
    first, second = specs()
    with gpu_like("sm_90"):
        made = bound(first, package)
        kept = second.kept._replace(shape=(made._workspace_bytes,))
        rest = bound(replace(second, kept=kept), package)
        module = module_of(package.__name__, package.OPS, "prefill")
        plan = module.all_plans(first)[-1] if package is portable else module.all_plans()[-1]
        plan = plan._replace(segment=1024)
        whole = module.planned_launches(first.prefill(), plan)
    assert made._workspace == rest._workspace == whole._workspace
    names = [call.kernel.name for call in made.calls]
    assert names.pop() == "chain_kernel"
    names += [call.kernel.name for call in rest.calls]
    assert names == [call.kernel.name for call in whole.calls]
    assert rest.calls[0].arguments == whole.calls[len(made.calls) - 1].arguments
