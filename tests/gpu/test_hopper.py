"""The Gluon kernels compile for Hopper without one, with production's constants, and fit; plans."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

pytest.importorskip("triton")
pytest.importorskip("triton.experimental.gluon.nvidia.hopper")

import triton
from sluice.backends.hopper.prefill_chunks import hopper_chunks_kernel
from sluice.backends.hopper.prefill_state import hopper_state_kernel
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from sluice.backends.hopper import prefill
from sluice.backends.triton import interpreted
from tests.gpu.cross import resources, sass

C, K = 64, 128
HEADS = {"HQ": 16, "HK": 16, "HV": 32, "K": K, "V": K, "HEADS": 2}
FLOATS = {"g", "A_log", "dt_bias", "beta", "b", "g2", "r_k", "joined", "state"}
INDICES = {"slots": "*i64", "write_slots": "*i64", "has_state": "*i1", "cu_seqlens": "*i32"}
INDICES["hard"] = "*i8"
NO_NORM = {"r_k_ptr": None}
NO_RAW = {"A_log_ptr": None, "dt_bias_ptr": None, "RAW_BETA": False}
STATE = {
    "NUM_BUFFERS": prefill.NUM_BUFFERS,
    "STATE_KV": False,
    "joined_ptr": None,
    "OUTPUT": True,
}
KERNELS = {
    "chunks": (hopper_chunks_kernel, NO_NORM | NO_RAW),
    "chunks, raw gates and norm": (hopper_chunks_kernel, {"RAW_BETA": True}),
    "chunks, no decay": (hopper_chunks_kernel, NO_NORM | NO_RAW | {"g_ptr": None, "g2_ptr": None}),
    "chunks, a key head a program": (hopper_chunks_kernel, {"HV": 64, "RAW_BETA": True}),
    "states, 64 columns": (
        hopper_state_kernel,
        STATE | NO_NORM | {"BLOCK_V": 64},
    ),
    "states, 128 columns, no norm": (
        hopper_state_kernel,
        STATE | NO_NORM | {"BLOCK_V": 128},
    ),
    "states, 128 columns": (
        hopper_state_kernel,
        STATE | {"BLOCK_V": 128, "STATE_KV": True, "cu_seqlens_ptr": None},
    ),
    "segments' effects": (
        hopper_state_kernel,
        {k: v for k, v in STATE.items() if k != "joined_ptr"} | {"BLOCK_V": 128, "OUTPUT": False},
    ),
}

SPILLS = {"states, 128 columns": 176}
"""Bytes per thread, of four warpgroups that share the registers of an SM; 64 for kernels that are
not named. Triton 3.6 spills 144 bytes, none of them in a loop over chunks; Triton 3.8 spills 168.
"""


def kind(name: str, chunks: bool) -> str:
    """The type of a kernel's parameter in Triton's notation, for either kernel."""
    number = "bf16"
    if name.endswith("_desc"):
        width = K if chunks else C
        layout = gl.NVMMASharedLayout.get_default_for([C, width], gl.bfloat16)
        return f"tensordesc<{number}[{C}, {width}],{layout!r}>"
    base = name.removesuffix("_ptr")
    if base == name:
        return "fp32" if name in ("scale", "beta_scale") else "i32"
    return INDICES.get(base) or ("*fp32" if base in FLOATS else f"*{number}")


@pytest.mark.slow
@pytest.mark.skipif(interpreted(), reason="the interpreter does not compile")
@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_compiles_for_hopper_and_fits(name):
    """Almost no spills, shared memory of one SM, and tensor-core instructions that do not wait.

    If registers are short, ptxas waits after each of these instructions; only the code shows it.
    """
    fn, constants = KERNELS[name]
    constants = HEADS | constants
    signature, values, attributes = {}, {}, {}
    for i, (argument, parameter) in enumerate(zip(fn.arg_names, fn.params, strict=True)):
        if argument in constants:
            signature[argument], values[(i,)] = "constexpr", constants[argument]
            continue
        signature[argument] = kind(argument, fn is hopper_chunks_kernel)
        if argument.endswith("_ptr") and not parameter.do_not_specialize_on_alignment:
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = GluonASTSource(fn=fn, signature=signature, constexprs=values, attrs=attributes)
    options = {"num_warps": 4}
    if fn is hopper_chunks_kernel:
        options["maxnreg"] = prefill.CHUNK_REGISTERS
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
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


def problem(N: int, tokens: int, HV: int, *, batch_invariant: bool = False) -> SimpleNamespace:
    """The inputs of a plan, for a packed call of N sequences of equal length."""
    return SimpleNamespace(N=N, T=N * tokens, HV=HV, varlen=True, batch_invariant=batch_invariant)


@pytest.mark.parametrize("HV", [4, 8, 32, 64])
@pytest.mark.parametrize("N", [1, 3, 8])
@pytest.mark.parametrize("tokens", [64, 2048, 8192, 131072])
def test_a_plan_splits_into_whole_chunks_or_not_at_all(tokens, N, HV):
    """Segments are whole chunks, and long enough to keep the workspace small."""
    plan = prefill.plan(problem(N, tokens, HV), 132)
    assert plan.BLOCK_V in (64, 128)
    assert plan.segment % C == 0
    if plan.segment:
        assert plan.segment < tokens
        workspace = (tokens * N // plan.segment + N) * prefill.STATE_TOKENS
        assert workspace <= prefill.ROOM * tokens * N, "all in all 1.5 times v"
    assert prefill.plan(problem(N, tokens, HV, batch_invariant=True), 132).segment == 0


def test_a_long_sequence_with_few_heads_is_split_and_a_full_chip_is_not():
    """Eight heads leave most of 132 SMs idle; 64 heads fill them."""
    assert prefill.plan(problem(1, 32768, 8), 132).segment > 0
    assert prefill.plan(problem(1, 32768, 64), 132).segment == 0
    assert prefill.plan(problem(8, 4096, 64), 132) == prefill.Plan(0, 128)
