"""The Triton kernels of the backward of prefill compile for GPUs that are not here."""

from __future__ import annotations

import re

import pytest
import torch

pytest.importorskip("triton")

from sluice.backends.triton import interpreted
from sluice.contract.backward import DeltaBackwardSpec
from sluice.contract.meta import Meta
from tests.gpu.cross import SHARED, bound, compile_for, gpu_like, resources

pytestmark = [
    pytest.mark.skipif(interpreted(), reason="the interpreter does not compile"),
    pytest.mark.slow,
]
SPILLS = {
    "backward_walk_kernel": 384,
    "backward_queries_kernel": 768,
    "backward_keys_kernel": 1408,
}
"""Bytes of stack per thread on Hopper."""


def calls(target):
    """The launches of a backward of 2,048 tokens in bfloat16."""
    HK, HV, K = 2, 4, 128
    with gpu_like(target) as device:

        def meta(*shape, dtype=torch.bfloat16):
            return Meta((), (), dtype, device).new_empty(*shape)

        q, v = meta(1, 2048, HK, K), meta(1, 2048, HV, K)
        gate = meta(1, 2048, HV, dtype=torch.float32)
        state = meta(1, HV, K, K, dtype=torch.float32)
        inputs = (q, q, v, gate, gate, None, None, state, None, None, v, state)
        made = (q, q, v, gate, gate, None, None, state)
        options = (None, True, False, "vk")
        spec = DeltaBackwardSpec.make("prefill_backward", inputs + made, options)
        return bound(spec).calls


@pytest.mark.parametrize("target", ["sm_90", "sm_89"])
def test_the_kernels_fit(target):
    for launch in calls(target):
        used, kernel = resources(compile_for(launch, target)), launch.kernel.name
        assert used.shared <= 1024 * SHARED[target], f"{kernel}: {used}"
        if target == "sm_90":
            assert used.spills <= SPILLS.get(kernel, 32), f"{kernel}: {used}"


def test_no_operand_is_the_transpose_of_what_a_product_made():
    """Triton 3.4 to 3.7.0 compiles such products wrongly for Hopper (FLA 640, 984).

    And no program with such products has two warpgroups: Triton up to 3.8 lets one overwrite what
    the other's products still read (triton-lang/triton 11047).
    """
    turned = re.compile(r"tt\.trans .*: tensor<\w*x(f32|f16|bf16),")
    for launch in calls("sm_90"):
        code = compile_for(launch, "sm_90").asm["ttgir"]
        if "warp_group_dot" in code:
            assert not turned.search(code), launch.kernel.name
            assert "#ttg.linear" not in code, launch.kernel.name
            assert launch.options["num_warps"] == 4, launch.kernel.name
