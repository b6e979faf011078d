"""The Gluon kernel of gradients: compiled and run in the emulator, after Triton's walks."""

from __future__ import annotations

import itertools

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("triton.experimental.gluon.nvidia.hopper")

import sluice
from sluice import calls
from sluice.backends.hopper import gradients
from sluice.backends.hopper import prefill_backward as hopper_backward
from sluice.backends.triton import interpreted, prefill_backward
from sluice.ops.delta import FUNCTIONAL
from sluice.testing import gradients as exact
from sluice.testing.compare import assert_same_bits, assert_within
from tests.gpu import gradient_kernels
from tests.gpu.cross import SHARED, backward_specs_of, compile_for, gpu_like, resources, sass
from tests.gpu.emulator import machine
from tests.gpu.emulator.driver import emulated
from tests.gpu.gluon_kernels import hurried
from tests.training.calls import HALF, Call

pytestmark = pytest.mark.skipif(interpreted(), reason="kernels are not compiled there")
needs_emulator = pytest.mark.skipif(machine.missing() is not None, reason=str(machine.missing()))
BFLOAT16, FLOAT16 = torch.bfloat16, torch.float16
ARGUMENTS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
BASE = Call("base", B=1, T=64, HQ=1, HK=1, HV=4, K=128, V=128, state=False)
"""With states, few heads or few tokens (triton/kernels/backward_chunks.py) every chunk is hard."""


PAIRS = {"backward_pairs_kernel", "backward_queries_kernel", "backward_keys_kernel"}


def fused_calls(p, memory, w, *_):
    """In place of ``prefill_backward._gradients``. One program goes through all chunks."""
    assert gradients.refuse(p) is None
    return gradients.gradient_calls(p, memory, w, programs=1)


def drawn(call, dtype):
    """A call's leaves and options, its exact outputs, and gradients of them."""
    leaves, options = call.make(dtype)
    o, final = exact.delta(**leaves, **options)
    gen = torch.Generator().manual_seed(1)
    tokens = leaves["v"].shape[1]
    do = torch.randn(o.shape[0], tokens, *o.shape[2:], generator=gen).to(dtype)
    dfinal = torch.randn(final.shape, generator=gen) if call.state else None
    return leaves, options, (o, final), do, dfinal


def backward_of(leaves, options, do, dfinal, fused=True):
    """The gradients by name: by the kernel after Triton's walks, or by Triton's three."""
    given = [leaves[n].detach() if n in leaves else None for n in ARGUMENTS]
    given += [options.get("cu_seqlens"), None, do, dfinal, *[None] * len(ARGUMENTS)]
    kept = tuple(options[n] for n in ("scale", "normalize_qk", "neg_eigval", "state_layout"))
    calls.forget()
    with emulated("sm_90") as driver, pytest.MonkeyPatch.context() as patch:
        if fused:
            patch.setattr(prefill_backward, "_gradients", fused_calls)
        made = calls.run(FUNCTIONAL.backward, given, kept, None, "triton")
    names = {kernel.program.name for kernel in driver.kernels.values()}
    assert names & {"hopper_gradients_kernel", *PAIRS} == (
        {"hopper_gradients_kernel"} if fused else PAIRS
    )
    return {n: x for n, x in zip(ARGUMENTS, made[-len(ARGUMENTS) :], strict=True) if n in leaves}


def test_no_memory_is_kept_for_what_stays_on_the_chip():
    def run():
        leaves, options = BASE.make(BFLOAT16)
        return leaves, None, sluice.prefill(**leaves, **options)

    with gpu_like("sm_90") as device:
        (spec,) = backward_specs_of(run, device)
        ours, portable = (m.launches(spec)._workspace for m in (hopper_backward, prefill_backward))
    assert set(portable) - set(ours) == {"ws.n", "ws.n_low", "ws.h", "ws.by_pair", "ws.by_query"}
    assert set(ours) <= set(portable)


def check(call, dtype):
    """Every gradient of a call, against the recurrence in float64."""
    leaves, options, (o, final), do, dfinal = drawn(call, dtype)
    end = leaves["v"].shape[1] if call.lengths is None else sum(call.lengths)
    by = [do[:, : o.shape[1]].double(), *([] if dfinal is None else [dfinal.double()])]
    by[0][:, end:] = 0
    do[:, end:] = float("nan")
    wanted = torch.autograd.grad([o, final][: len(by)], list(leaves.values()), by)
    found = backward_of(leaves, options, do, dfinal)
    for (name, a), b in zip(found.items(), wanted, strict=True):
        if name in ("q", "k", "v", "g", "beta"):
            assert not a[:, end:].any(), f"d{name} behind the last border"
            a, b = a[:, :end], b[:, :end]
        assert_within(a, b, HALF.get(name, 6e-3), name=f"{call}: d{name}")


PACKED = BASE.of(name="packed, raw", lengths=(5, 0, 64, 1, 130), raw=True)
HARD = BASE.of(name="identical", T=130, HV=2, keys="identical", rate=0.0, beta="one", state=True)
SHORT = PACKED.of(name="short, raw", lengths=(5, 0, 70))
MIXED = BASE.of(name="hard and not", lengths=(129, 64, 130))
"""The last token of the 129 and the 64 tokens are hard."""
QUICK = [
    (SHORT, BFLOAT16),
    (MIXED, BFLOAT16),
    (BASE.of(name="no norm", T=70, normalize=False), FLOAT16),
]
MORE = [
    BASE.of(name="whole chunk, no norm", normalize=False),
    BASE.of(name="no decay", T=130, decay=None),
    BASE.of(name="two rows, raw, states", B=2, T=100, raw=True, neg_eigval=True, state=True),
    BASE.of(name="heads", T=130, HQ=2, HK=2),
    BASE.of(name="as many heads, states", T=130, HQ=4, HK=4, layout="kv", scale=0.3, state=True),
    BASE.of(name="two heads", T=70, HV=2),
    BASE.of(name="one head", T=70, HV=1),
    BASE.of(name="strong decay", T=130, rate=20.0),
    BASE.of(name="beta 0", T=130, beta="zero"),
    BASE.of(name="correlated", T=130, HV=2, keys="correlated", rate=0.001, beta="one"),
    BASE.of(name="repeated", T=130, HV=4, keys="repeated", rate=0.0, beta="one"),
    BASE.of(name="repeated, packed", lengths=(30, 0, 64, 100), HV=2, keys="repeated", rate=0.01),
    HARD.of(name="identical, no decay, no norm", decay=None, normalize=False),
    PACKED,
    HARD,
]


@needs_emulator
@pytest.mark.slow
@pytest.mark.parametrize(("call", "dtype"), QUICK, ids=str)
def test_gradients(call, dtype):
    check(call, dtype)


@needs_emulator
@pytest.mark.slow
def test_gradients_of_hard_chunks_are_those_of_tritons_kernels():
    """Both take E, Y and N as two terms, which the limits of ``check`` hardly show."""
    leaves, options, _, do, dfinal = drawn(HARD, BFLOAT16)
    found, other = (backward_of(leaves, options, do, dfinal, fused) for fused in (True, False))
    for name, x in found.items():
        assert_within(x, other[name].double(), 2e-4, name=f"d{name}")


@needs_emulator
@pytest.mark.long
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
@pytest.mark.parametrize("call", MORE, ids=str)
def test_gradients_of_every_kind(call, dtype):
    """``test_gradients`` meets every part of the kernel."""
    check(call, dtype)


@needs_emulator
@pytest.mark.long
def test_the_same_bits_each_time():
    """The order of warps and programs is another one in each launch."""
    leaves, options, _, do, dfinal = drawn(PACKED, BFLOAT16)
    do[:, sum(PACKED.lengths) :] = 0
    first, again = (backward_of(leaves, options, do, dfinal) for _ in range(2))
    for name, x in first.items():
        assert_same_bits(again[name], x, name)


OFTEN = [(gradient_kernels.USUAL, BFLOAT16), (gradient_kernels.CALLS[-1], FLOAT16)]
COMPILED = [
    pytest.param(*x, marks=() if x in OFTEN else pytest.mark.long, id="{}, {}".format(*x))
    for x in itertools.product(gradient_kernels.CALLS, (BFLOAT16, FLOAT16))
]


@pytest.mark.slow
@pytest.mark.parametrize(("call", "dtype"), COMPILED)
def test_the_kernel_fits(call, dtype):
    """Few spills, and products that ptxas does not make one by one.

    test_releases.py compiles one variant with the oldest Triton as well.
    """
    compiled = compile_for(gradient_kernels.kernel_call(call, dtype), "sm_90")
    used, code = resources(compiled), sass(compiled)
    assert used.spills <= gradient_kernels.SPILLS[str(call)], used
    assert used.shared <= 1024 * SHARED["sm_90"], used
    assert 0 < 2 * code.count("WARPGROUP.ARRIVE") < code.count("HGMMA")
    assert hurried(compiled.asm["ptx"]) == []


def test_other_numbers_of_query_heads_are_left_to_tritons_kernels():
    def run():
        leaves, options = BASE.of(HQ=2, HV=2).make(BFLOAT16)
        return leaves, None, sluice.prefill(**leaves, **options)

    with gpu_like("sm_90") as device:
        (spec,) = backward_specs_of(run, device)
    assert gradients.refuse(spec) == "needs as many query heads as key heads, not 2 and 1"
