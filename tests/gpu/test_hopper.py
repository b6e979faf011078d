"""The Gluon kernels compile for Hopper without one, with production's constants, and fit; plans."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("triton.experimental.gluon.nvidia.hopper")


from sluice.backends.hopper import prefill
from sluice.backends.triton import interpreted
from sluice.layers import QwenShape
from sluice.model_calls import ModelCalls
from tests.gpu.cross import compile_for, resources, sass
from tests.gpu.gluon_kernels import KERNELS, SPILLS, hurried, kernel_call

C = 64


def test_the_kernels_are_those_that_their_names_say():
    constants = {
        name: {key: x for key, x in kernel_call(name).arguments.items() if key.isupper()}
        for name in KERNELS
    }
    assert constants["chunks, raw gates and norm"]["RAW_BETA"]
    assert not constants["chunks"]["RAW_BETA"]
    assert constants["states, 64 columns"]["BLOCK_V"] == 64
    assert constants["states, 128 columns"]["BLOCK_V"] == 128
    assert constants["states, 128 columns"]["STATE_KV"]
    assert constants["states, 128 columns"]["OUTPUT"]
    assert not constants["segments' effects"]["OUTPUT"]
    assert kernel_call("segments' effects").arguments["segments_ptr"] is not None
    assert kernel_call("states, 64 columns").arguments["write_slots_ptr"] is not None
    assert kernel_call("states, 128 columns").arguments["cu_seqlens_ptr"] is None
    assert kernel_call("states, 128 columns").arguments["r_k_ptr"] is not None
    assert kernel_call("chunks, no decay").arguments["g2_ptr"] is None


@pytest.mark.slow
@pytest.mark.skipif(interpreted(), reason="the interpreter does not compile")
@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_compiles_for_hopper_and_fits(name):
    """Almost no spills, shared memory of one SM, and tensor-core instructions that do not wait.

    If registers are short, ptxas waits after each of these instructions; only the code shows it.
    """
    compiled = compile_for(kernel_call(name), "sm_90")
    used = resources(compiled)
    assert used.spills <= SPILLS.get(name, 64)
    assert used.shared <= 227 * 1024
    code = sass(compiled)
    if kernel_call(name).kernel == prefill.CHUNKS_WARP:
        assert used.spills == 0
        assert used.shared <= 227 * 1024 // 12 - 1024, "twelve programs per SM"
        assert code.count("LDSM") > 64, "tiles are not read number by number"
    else:
        assert 0 < 2 * code.count("WARPGROUP.ARRIVE") < code.count("HGMMA")
    assert hurried(compiled.asm["ptx"]) == []


def test_an_arrival_in_front_of_the_barrier_is_found():
    store, arrive = "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r1];", "mbarrier.arrive.b64 _;"
    for meeting in ("bar.sync 3, 128;", "barrier.sync 1;", "bar.warp.sync -1;"):
        assert hurried("\n".join((store, meeting, arrive))) == []
        assert hurried("\n".join((meeting, store, arrive))) == [arrive]


def packed(N: int, tokens: int, HV: int, *, batch_invariant: bool = False) -> Any:
    """A packed call of N sequences of equal length."""
    model = ModelCalls(QwenShape("", 64, HV // 2, HV, 4, (0,)))
    made = model.call("prefill", "", N, tokens, True).spec(torch.device("cuda", 0))
    return replace(made, batch_invariant=batch_invariant)


@pytest.mark.parametrize("HV", [4, 8, 32, 64])
@pytest.mark.parametrize("N", [1, 3, 8])
@pytest.mark.parametrize("tokens", [64, 2048, 8192, 131072])
def test_a_plan_splits_into_whole_chunks_or_not_at_all(tokens, N, HV):
    """Segments are whole chunks, and long enough to keep the workspace small."""
    plan = prefill.best_plan(packed(N, tokens, HV), 132)
    assert plan.BLOCK_V in (64, 128)
    assert plan.segment % C == 0
    if plan.segment:
        assert plan.segment < tokens
        workspace = (tokens * N // plan.segment + N) * prefill.STATE_TOKENS
        assert workspace <= prefill.ROOM * tokens * N, "all in all 1.5 times v"
    assert prefill.best_plan(packed(N, tokens, HV, batch_invariant=True), 132).segment == 0


def test_a_long_sequence_with_few_heads_is_split_and_a_full_chip_is_not():
    """Eight heads leave most of 132 SMs idle; 64 heads fill them."""
    assert prefill.best_plan(packed(1, 32768, 8), 132).segment > 0
    assert prefill.best_plan(packed(1, 32768, 64), 132).segment == 0
    assert prefill.best_plan(packed(8, 4096, 64), 132) == prefill.Plan(0, 128)


@pytest.mark.parametrize(
    ("tokens", "HV", "segment"),
    [(8192, 24, 1664), (2048, 8, 704), (8192, 32, 2752), (32768, 32, 10944), (32768, 16, 4096)],
)
def test_a_sequence_is_cut_into_the_equal_parts_that_were_the_fastest(tokens, HV, segment):
    """Measured on an H200 (docs/kernels/prefill_log.md)."""
    assert prefill.best_plan(packed(1, tokens, HV), 132).segment == segment
