"""Compiled kernels in the emulator: they are right, and a fault put into their PTX is noticed.

``--long`` runs whole suites of other files on emulated GPUs (docs/kernels/emulator.md).
"""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")

import sluice
from sluice.backends import triton as backend
from sluice.testing import cases
from tests import checkpoint_bits, draft_bits
from tests.gpu.emulator import machine
from tests.gpu.emulator.driver import emulated
from tests.gpu.emulator.machine import EmulatorError, Kernel
from tests.gpu.emulator.ptx import UnknownError
from tests.training import kernel_calls
from tests.training.hopper_calls import ONE_BETA, SAME, USUAL, VANISHING

pytestmark = [
    pytest.mark.skipif(machine.missing() is not None, reason=str(machine.missing())),
    pytest.mark.skipif(backend.interpreted(), reason="kernels are not compiled there"),
]
HALF = torch.float16


def check(name, dtype, target="sm_80", backend="triton", change=str, **sizes):
    """A case of the contract on an emulated GPU; the launches."""
    case = cases.CASES[name].with_(**sizes)
    inputs = case.inputs(dtype, "cpu")
    expected = case.expected(inputs)
    with emulated(target, change) as driver:
        case.check(case.run(sluice, inputs, backend=backend), expected)
    return driver.launched


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["decode/one", "causal_conv1d/odd_channels"])
def test_compiled_kernels_are_right(name, dtype):
    assert check(name, dtype)


@pytest.mark.parametrize("size", [(40, 33), (128, 8)], ids=str)
def test_the_compiler_chooses_no_order_of_sums(size):
    """What it knows of addresses decides which lanes hold which keys; no interpreter shows that."""
    with emulated("sm_90") as driver:
        for n in (1, 2):
            draft_bits.check("triton", size, n)
    assert driver.launched


@pytest.mark.parametrize("layout", ["vk", "kv"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_float32_states_keep_that_order_though_the_compiler_knows_of_alignment(dtype, layout):
    with emulated("sm_90") as driver:
        draft_bits.check("triton", (128, 8), 2, dtype, torch.float32, layout)
    told = [m for m in driver.launched if m.kernel == "decode_kernel"]
    assert told, "the kernel that is told of alignment"


@pytest.mark.parametrize("per_key", [False, True], ids=["decay per head", "per key"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_checkpoint_has_the_bits_of_a_call_that_ended_there(dtype, per_key):
    """Sums over a chunk's tokens are rounded by the order in which lanes meet."""
    with emulated("sm_90") as driver:
        checkpoint_bits.check("triton", dtype, (32, 16), heads=3, per_key=per_key)
    assert driver.launched


def test_prefill_is_right_in_16_bits():
    """Tensor cores, matrices through shared memory, asynchronous copies."""
    assert len(check("prefill/T65", HALF)) >= 3


@pytest.mark.parametrize("name", ["packed_tail", "packed_raw", "identical_keys"])
def test_hoppers_prefill_is_right_with_a_value_head_per_key_head(name):
    """Its parallel half has a kernel for this, which no case of the contract runs here."""
    heads = {"Hk": 2, "Hv": 2, "K": 128, "V": 128}
    launched = check(f"prefill/{name}", torch.bfloat16, "sm_90", "hopper", **heads)
    assert launched[0].kernel == "hopper_chunks_warp_kernel"


def backward(call, dtype, backend="hopper", change=str):
    """The gradients of a call of prefill by kernels for Hopper; the launches."""
    with emulated("sm_90", change) as driver:
        kernel_calls.check(call, dtype, backend)
    return driver.launched


def test_hoppers_backward_is_right():
    """A tail, packed sequences, the end of an empty one; tests/training/test_hopper.py has all."""
    assert backward(USUAL.of(lengths=(5, 0, 130)), torch.bfloat16)


@pytest.mark.parametrize("call", [SAME, *VANISHING], ids=str)
@pytest.mark.parametrize("name", ["hopper", "triton"])
def test_gradients_of_hard_chunks(name, call):
    """16 bits alone have such chunks, and Triton's interpreter rounds bfloat16 unlike a GPU."""
    assert backward(call, torch.bfloat16, name)


@pytest.mark.parametrize(
    ("name", "call"), [("hopper", ONE_BETA), ("triton", VANISHING[2])], ids=str
)
def test_gradients_of_hard_chunks_in_float16(name, call):
    """There N has a power of two too. tests/training runs all calls."""
    assert backward(call, HALF, name)


# ------------------------------------------------------------------------------ faults in PTX


def without(pattern, by=""):
    """PTX without what matches."""
    return lambda text: re.sub(pattern, by, text)


def test_a_missing_barrier_is_a_race():
    between = r"(st\.shared[^;]*;(?:\s|\$\w+:|\.loc[^\n]*)*)bar\.sync\s+0;"
    with pytest.raises(EmulatorError, match=r"prefill_.*_kernel: .* a race on shared memory"):
        check("prefill/T65", HALF, change=without(between, r"\1"))


def test_a_missing_mask_is_memory_outside_of_every_tensor():
    unmasked = without(r"@%p\d+ (ld\.global)", r"\1")
    with pytest.raises(EmulatorError, match=r"outside of every tensor.*PTX line"):
        check("causal_conv1d/odd_channels", torch.float32, change=unmasked)


def test_a_missing_wait_is_seen_in_the_numbers():
    """A copy comes when it is waited for; until then its place holds NaN."""
    hasty = without(r"cp\.async\.wait_group\s+\d+;", "")
    with pytest.raises((AssertionError, EmulatorError)):
        check("prefill/T65", HALF, change=hasty)


# --------------------------------------------------------------------------- small kernels by hand

FRAME = """
.version 8.0
.target sm_80
.extern .shared .align 16 .b8 global_smem[];
.visible .entry tried(.param .u64 tried_param_0)
{{
    .reg .pred %p<4>;
    .reg .b32 %r<9>;
    .reg .b64 %rd<9>;
    ld.param.b64 %rd1, [tried_param_0];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd2, %r1, 4;
    add.s64 %rd3, %rd1, %rd2;
{body}
    ret;
}}
"""


def tried(body, threads=32, shared=1024):
    """What a kernel writes: a word per thread."""
    out = torch.full((threads,), -1, dtype=torch.int32)
    place = ctypes.c_uint64(out.data_ptr())
    bounds = (out.data_ptr(), out.data_ptr() + 4 * threads)
    Kernel(FRAME.format(body=body)).launch(
        1, threads, shared, [ctypes.addressof(place)], [bounds], seed=3
    )
    return out.tolist()


def test_lanes_that_go_apart_meet_again():
    found = tried("""
        mov.b32 %r2, 0;
        mov.b32 %r3, 0;
    $again:
        setp.ge.u32 %p1, %r3, %r1;
        @%p1 bra $done;
        add.s32 %r2, %r2, %r3;
        add.s32 %r3, %r3, 1;
        bra.uni $again;
    $done:
        shfl.sync.bfly.b32 %r4, %r2, 1, 31, -1;
        st.global.b32 [%rd3], %r4;
    """)
    assert found == [sum(range(i ^ 1)) for i in range(32)]


@pytest.mark.parametrize("known", ["sad.u32 %r2, %r1, %r1, %r1;", "add.s32 %r2, %r1, %r1, %r1;"])
def test_what_it_does_not_know_it_names(known):
    """Also an operand more than it knows of: max.f32 has three on some GPUs."""
    with pytest.raises(UnknownError, match=rf"tried: \S+: {re.escape(known)}.*line 14"):
        tried("    " + known)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("st.global.b32 [%rd3+2], %r1;", "misaligned"),
        ("st.global.b32 [%rd3+4], %r1;", "outside of every tensor: 4 bytes after a tensor of 128"),
        ("st.shared.b32 [%r1], %r1;", "shared memory at"),
        ("setp.eq.b32 %p1, %r1, 0; @%p1 bra $x; bar.sync 0; $x:", "lanes of a warp went apart"),
        ("setp.lt.u32 %p1, %r1, 32; @%p1 bar.sync 1, 96;", "every warp waits for ever"),
        ("mbarrier.arrive.shared::cta.b64 _, [global_smem];", "nobody initialised"),
    ],
    ids=["misaligned", "outside", "shared", "apart", "for ever", "mbarrier"],
)
def test_what_no_kernel_may_do(body, said):
    with pytest.raises(EmulatorError, match=said):
        tried(body, threads=32)


# ------------------------------------------------------------------------------------- whole suites

CONTRACT, PASSES = "tests/test_contract.py", "tests/test_transitions.py"
PROBES = "tests/gpu/test_sequences.py"
TRAINING = (
    "tests/training/test_hopper.py",
    "tests/training/test_triton.py",
    "tests/training/test_triton_layer.py",
)


@pytest.mark.long
@pytest.mark.parametrize("target", ["sm_80", "sm_89", "sm_90", "sm_120"])
@pytest.mark.parametrize(
    ("files", "chosen"),
    [((CONTRACT, PASSES), "triton-"), ((CONTRACT, PASSES), "hopper-"), ((PROBES, *TRAINING), "")],
    ids=["triton", "hopper", "training"],
)
def test_other_suites_on_an_emulated_gpu(files, chosen, target):
    """``test_compiled_kernels_are_right`` meets one kernel of each kind."""
    if chosen == "hopper-" and target != "sm_90":
        pytest.skip("kernels for Hopper alone")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.gpu.emulator.plugin"]
    command += ["--emulate", target, "-k", chosen, *files]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.mark.long
@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        (r"@!complete bra\.uni waitLoop;", "a race on shared memory|relative error|NaN"),
        (r"wgmma\.wait_group\.sync\.aligned\s+\d+;", "relative error|NaN|not finite"),
        (r"@%p\d+ mbarrier\.arrive\.shared[^;]*;", "every warp waits for ever"),
    ],
    ids=["mbarrier", "wgmma", "arrival"],
)
def test_missing_waits_of_hoppers_kernels_are_seen(pattern, said):
    """As the three tests above, of Triton's kernels."""
    assert check("prefill/T65", HALF, "sm_90", "hopper", K=128, V=128)
    with pytest.raises((AssertionError, EmulatorError), match=said):
        check("prefill/T65", HALF, "sm_90", "hopper", without(pattern), K=128, V=128)
    with pytest.raises((AssertionError, EmulatorError), match=said):
        backward(USUAL, HALF, change=without(pattern))
