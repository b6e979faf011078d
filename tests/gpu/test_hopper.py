"""The Gluon kernels compile for Hopper without one, with production's constants, and fit; plans."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("triton.experimental.gluon.nvidia.hopper")

import triton

import sluice
from sluice.backends.hopper import prefill
from sluice.backends.hopper.chunks_kernel import hopper_chunks_kernel
from sluice.backends.hopper.state_kernel import hopper_state_kernel
from sluice.backends.triton import interpreted
from sluice.backends.triton.arguments import KernelCall
from sluice.layers import QwenShape
from sluice.model_calls import Kinds, ModelCalls
from tests.gpu.cross import compile_for, gpu_like, resources, sass, specs_of

C, K = 64, 128
NARROW, WIDE, SPLIT = (0, 64), (0, 128), (1216, 128)


def spec(
    HV: int = 32,
    layout: str = "vk",
    packed: bool = True,
    slots: bool = True,
    norm: bool = False,
    raw: bool = False,
    decay: bool = True,
) -> Any:
    """A prefill of two prompts of 4,096 tokens, 16 key heads."""
    model = ModelCalls(QwenShape("", 64, 16, HV, 4, (0,)), Kinds(state_layout=layout))
    (q, k, v, g, beta), options = model.prefill(2, 4096, packed)
    if raw:
        rates = ("A_log", "dt_bias")
        options = {**options, **{name: model.weights[name].float() for name in rates}}
    if slots:
        rows = {"slots": model.rows(2)["slots"], "write_slots": model.rows(2)["slots"]}
        options = {**options, **rows, "has_state": model.packed(2, 1)["has_state"]}
    gates = g if decay else None, beta
    (made,) = specs_of(lambda: sluice.prefill(q, k, v, *gates, **options, normalize_qk=norm))
    return made


KERNELS = {
    "chunks": (hopper_chunks_kernel, NARROW, {}),
    "chunks, raw gates and norm": (hopper_chunks_kernel, NARROW, {"raw": True, "norm": True}),
    "chunks, no decay": (hopper_chunks_kernel, NARROW, {"decay": False}),
    "chunks, a key head a program": (
        hopper_chunks_kernel, NARROW, {"HV": 64, "raw": True, "norm": True},
    ),
    "states, 64 columns": (hopper_state_kernel, NARROW, {}),
    "states, 128 columns, no norm": (hopper_state_kernel, WIDE, {}),
    "states, 128 columns": (
        hopper_state_kernel, WIDE, {"norm": True, "layout": "kv", "packed": False},
    ),
    "states, 128 columns, own states": (
        hopper_state_kernel, WIDE, {"norm": True, "layout": "kv", "packed": False, "slots": False},
    ),
    "segments' effects": (hopper_state_kernel, SPLIT, {"norm": True}),
}  # fmt: skip


def kernel_call(name: str) -> KernelCall:
    """The launch of a kernel by its plan; of segments' effects the first of two."""
    kernel, plan, options = KERNELS[name]
    with gpu_like("sm_90"):
        calls = prefill.planned_launches(spec(**options), prefill.Plan(*plan)).calls
    return next(call for call in calls if call.kernel is kernel)


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


SPILLS = {"states, 128 columns": 176, "states, 128 columns, own states": 464}
"""Bytes per thread, of four warpgroups that share the registers of an SM; 64 for kernels that are
not named. Triton 3.6 spills 144 bytes, none of them in a loop over chunks; Triton 3.8 spills 168.
Of states without slots Triton 3.8 spills 456 bytes, and touches them five times in its loops.
"""
if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9):
    SPILLS = {
        "states, 128 columns, no norm": 128,
        "states, 128 columns": 264,
        "states, 128 columns, own states": 520,
    }
    """With its newer ptxas: places of threads, of which a chunk loads three words. All but 8 bytes
    come from an option that Triton sets around a fault of ptxas (docs/kernels/triton.md)."""


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
    assert 0 < 2 * code.count("WARPGROUP.ARRIVE") < code.count("HGMMA")
    assert hurried(compiled.asm["ptx"]) == []


def hurried(ptx: str) -> list[str]:
    """Arrivals at an mbarrier after a store to shared memory, without a barrier in between.

    One thread arrives for its whole group, so a barrier must separate the others' stores from it.
    compute-sanitizer's racecheck does not see this order (tests/gpu/race_probe.py).
    """
    found, stored = [], False
    for line in ptx.splitlines():
        if re.search(r"\bst\.shared|\bstmatrix", line):
            stored = True
        elif re.search(r"\bbar(rier)?\.(warp\.)?sync", line):
            stored = False
        elif "mbarrier.arrive" in line and "expect_tx" not in line and stored:
            found.append(line.strip())
    return found


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
