"""States [K, V], as in transformers: their bits, and how the kernels load and store them.

Tests of bits run on a GPU, or on a CPU in Triton's interpreter; machine code is compiled anywhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import sluice
from sluice import dispatch
from sluice.backends.triton import interpreted
from sluice.model_calls import ModelCall
from sluice.testing import compare
from tests.gpu.calls import Serving
from tests.gpu.cross import TARGETS, compile_for, gpu_like, kernel_calls, resources, sass
from tests.gpu.random_layer import DEVICE, HALF, Layer

runs = pytest.mark.skipif(
    dispatch.unavailable("triton") is not None, reason=str(dispatch.unavailable("triton"))
)
compiles = pytest.mark.skipif(interpreted(), reason="the interpreter does not compile")
STATES = pytest.mark.parametrize("state", [torch.float32, HALF], ids=("fp32", "half"))
SIZE = {"HK": 4, "HV": 8, "K": 128, "V": 128} if DEVICE == "cuda" else {"HK": 1, "HV": 2}


class KV(Layer):
    """The same numbers, with each state [K, V]."""

    def __init__(self, *sizes: int, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.state = self.state.mT.contiguous()

    def delta(self, rows: Any = slice(None), tokens: int | None = None) -> dict[str, Any]:
        return {**super().delta(rows, tokens), "state_layout": "kv"}

    def step(self, state: Tensor, window: Tensor, rows: Any = slice(None)) -> Tensor:
        pools = {"state": state, "conv_state": window, "state_layout": "kv"}
        return sluice.step(
            self.qkvz[rows],
            self.ba[rows],
            **self.rates,
            **self.weights,
            **pools,
            slots=self.slots[rows],
            backend="triton",
        )


@runs
@pytest.mark.gpu
@STATES
@pytest.mark.parametrize("tokens", [1, 2])
def test_decode_of_a_row_does_not_depend_on_the_batch(state, tokens):
    layer = KV(3, tokens, state=state, **SIZE)
    together, alone = layer.state.clone(), layer.state.clone()
    o = layer.decode(together)
    for i in range(layer.N):
        one = layer.decode(alone, slice(i, i + 1))
        compare.assert_same_bits(one, o[i : i + 1], f"o of row {i}")
    compare.assert_same_bits(alone, together, "state")


@runs
@pytest.mark.gpu
@STATES
@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize("heads", [(2, 2), (1, 3)], ids=str)
def test_step_of_a_row_does_not_depend_on_the_batch(state, tokens, heads):
    layer = KV(3, tokens, state=state, **{**SIZE, "HK": heads[0], "HV": heads[1]})
    layer.steps_alone_as_together()


@runs
@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 2])
def test_step_leaves_what_it_leaves_in_the_other_order(tokens):
    """Sums have another order, so results differ by float32 rounding only."""
    sizes = {**SIZE, "K": 48, "V": 32}
    found = []
    for kind in (KV, Layer):
        layer = kind(2, tokens, **sizes)
        pools = layer.state.clone(), layer.window.clone()
        y = layer.step(*pools)
        state = pools[0].mT if kind is KV else pools[0]
        found.append((y.float(), state, pools[1]))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=4e-3, atol=4e-3)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-5, atol=1e-5)
    assert torch.equal(found[0][2], found[1][2])


@runs
@pytest.mark.gpu
@STATES
@pytest.mark.parametrize("accepted", [0, 1, 4])
def test_verify_and_commit_leave_the_bits_of_decode(state, accepted):
    layer = KV(2, 4, state=state, **SIZE)
    decoded, committed = layer.state.clone(), layer.state.clone()
    if accepted:
        expected = layer.decode(decoded, tokens=accepted)
    o, draft = sluice.verify(**layer.delta(), state=committed, backend="triton")
    count = torch.full((2,), accepted, dtype=torch.int32, device=DEVICE)
    sluice.commit(draft, count, backend="triton")
    compare.assert_same_bits(committed, decoded, "state")
    if accepted:
        compare.assert_same_bits(o[:, :accepted].contiguous(), expected, "o")


def calls(state: torch.dtype) -> dict[str, ModelCall]:
    model = Serving.of(layout="kv", state=state)
    return {
        "step": model.call("step", "", 2, 1, True),
        "step of 4 tokens": model.call("step", "", 2, 4, True),
        "decode": model.call("decode", "", 2, 1),
        "verify": model.call("verify", "", 2, 4),
        "commit": model.call("commit", "", 2, 4),
    }


@compiles
@pytest.mark.slow
@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16], ids=("fp32", "bf16"))
@pytest.mark.parametrize("name", calls(torch.float32))
def test_a_state_is_moved_16_bytes_at_a_time_and_stays_in_its_threads(state, name):
    """Loads are as wide as possible and as few as possible, and none goes through shared memory.

    Threads exchange only vectors: keys, values and sums. If a state of 128 × 128 were summed in the
    wrong order, threads would exchange the state itself, by 390 instructions or more, or all of it
    through shared memory.
    """
    with gpu_like("sm_90") as device:
        launches = kernel_calls(calls(state)[name].run, device)
    assert launches
    for launched in launches:
        compiled, kernel = compile_for(launched, "sm_90"), launched.kernel.name
        code, used = sass(compiled), resources(compiled)
        rows = launched.arguments["BLOCK_V"] * 128 * state.itemsize  # bytes of a program
        accesses = rows // (16 * 32 * launched.options["num_warps"])
        written = launched.arguments.get("draft_k_ptr") is None or kernel != "decode_kernel"
        loads = len(re.findall(r"\bLDG\.E\S*\.128\b", code))
        assert loads >= accesses, f"{kernel}: {loads} wide loads, {accesses} needed"
        stores = len(re.findall(r"\bSTG\.E\S*\.128\b", code))
        assert stores == accesses * written, f"{kernel}: {stores}, {accesses} needed"
        exchanges = len(re.findall(r"\b(?:SHFL|LDS|STS|LDSM|STSM)\b", code))
        assert exchanges < 256, f"{kernel}: {exchanges} exchanges between threads"
        assert used.shared <= 4096, f"{kernel}: {used}"


def steps() -> Iterator[Any]:
    """(target, state, size, tokens): any two of them meet; ``--long`` runs the whole product."""
    for i, target in enumerate(TARGETS):
        for j, (size, tokens) in enumerate([(64, 4), (128, 1), (128, 4), (256, 1)]):
            for k, state in enumerate([torch.float32, torch.bfloat16]):
                marks = pytest.mark.long if (i + (j + 1) // 2 + k) % 2 else ()
                short = ("fp32", "bf16")[k]
                label = f"{size}-{tokens}-{short}-{target}"
                yield pytest.param(target, state, size, tokens, marks=marks, id=label)


@compiles
@pytest.mark.slow
@pytest.mark.parametrize(("target", "state", "size", "tokens"), list(steps()))
def test_step_fits(target, state, size, tokens):
    """No part of a state spills, except of one of 256 × 256, which fills all registers."""
    model = Serving.of(2, 4, size, size, layout="kv", state=state)
    with gpu_like(target) as device:
        (launched,) = kernel_calls(model.call("step", "", 2, tokens, True).run, device)
        used = resources(compile_for(launched, target))
        assert used.spills <= (2048 if size == 256 else 32), used
        assert used.shared <= 64 * 1024, used
