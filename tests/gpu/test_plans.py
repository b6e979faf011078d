"""Hopper's plan and workspace, machine code by device, and what a damaged file of kernels is."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("triton.experimental.gluon.nvidia.hopper")

from sluice import dispatch
from sluice.backends import hopper
from sluice.backends.hopper import prefill
from sluice.backends.triton import arguments, launch, shipped, variants
from sluice.contract.chunk_length import CHUNK
from sluice.contract.meta import Meta
from sluice.layers import QwenShape
from sluice.model_calls import ModelCalls
from tests.gpu.cross import gpu_like


def spec(HK: int = 2, HV: int = 4, **changes: Any) -> Any:
    model = ModelCalls(QwenShape("", 64, HK, HV, 4, (0,)))
    return replace(model.call("prefill", "", 2, 300, True).spec(torch.device("cuda", 0)), **changes)


def test_a_warp_makes_a_chunk_by_itself_where_key_heads_have_one_value_head():
    """Elsewhere it was slower on an H200 (docs/kernels/prefill_log.md)."""
    for HK, HV, kernel, programs in (
        (2, 2, prefill.CHUNKS_WARP, 2), (3, 3, prefill.CHUNKS_WARP, 3), (2, 4, prefill.CHUNKS, 1),
        (1, 2, prefill.CHUNKS, 1), (2, 6, prefill.CHUNKS, 2), (1, 8, prefill.CHUNKS, 1),
    ):  # fmt: skip
        p = spec(HK=HK, HV=HV)
        with gpu_like("sm_90"):
            call = prefill.planned_launches(p, prefill.Plan(0, 128)).calls[0]
        assert call.kernel == kernel
        assert call.programs == prefill.units_of(p, CHUNK, tail=True) * programs
        assert call.options["num_warps"] == (1 if kernel == prefill.CHUNKS_WARP else 4)


def test_a_segment_is_whole_chunks():
    for longest in (1, 64, 1000, 2048, 32768, 100_001):
        assert all(segment % CHUNK == 0 for segment in prefill.segments_of(longest))


def test_the_workspace_has_a_chunk_for_each_checkpoint_inside_of_one():
    slots = Meta((2, 5), (5, 1), torch.int64, torch.device("cuda", 0))
    for every, tails in ((50, 10), (64, 0)):
        p = spec(checkpoint_slots=slots, checkpoint_every=every)
        with gpu_like("sm_90"):
            made = prefill.planned_launches(p, prefill.Plan(0, 64))
        tokens = p.B * p.T + tails * CHUNK
        assert made._workspace["ws.ag"][1] == (tokens, p.HV, CHUNK)
        assert made._workspace["ws.beta32"][1] == (p.HV, tokens)


def test_machine_code_is_loaded_for_each_device(monkeypatch):
    """A function belongs to the context of one device."""
    loads = []
    monkeypatch.setattr(launch, "_codes", {})
    monkeypatch.setattr(launch, "_machine_codes", lambda needed, device: ["code"] * len(needed))
    monkeypatch.setattr(launch, "_load", lambda v, code, device: loads.append(device) or device)
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    for device in (second, first, second):
        assert launch._loaded(["variant"], device) == [device]
    assert loads == [second, first]


def test_a_damaged_file_is_no_verdict_on_a_release(monkeypatch):
    monkeypatch.setattr(hopper, "untried", lambda: "never ran with it")
    monkeypatch.setattr(hopper, "_failed", [])
    with pytest.raises(shipped.DamagedKernelError), hopper._trial():
        raise shipped.DamagedKernelError("its SHA-256 is another")
    assert hopper._failed == []


def test_whatever_the_compiler_is_told_is_in_the_name_of_machine_code():
    told = variants.Variant(
        arguments.Kernel("sluice.some", "kernel"),
        (variants.Parameter("x", "*bf16", None, True), variants.Parameter("N", "constexpr", 4)),
        (("num_warps", 4),),
    )
    pointer, number = told.parameters
    others = [
        told._replace(kernel=arguments.Kernel("sluice.some", "another")),
        told._replace(parameters=(pointer._replace(kind="*fp16"), number)),
        told._replace(parameters=(pointer._replace(aligned=False), number)),
        told._replace(parameters=(pointer, number._replace(value=8))),
        told._replace(options=(("num_warps", 8),)),
    ]
    assert len({told.key, *(other.key for other in others)}) == 1 + len(others)


@pytest.mark.parametrize(
    ("stride", "kind"), [(2**31 - 1, "i32"), (2**31, "i64"), (-(2**31), "i32")]
)
def test_a_number_beyond_32_bits_is_told_and_handed_over_in_64(monkeypatch, stride, kind):
    """Reliability row 5."""
    kernel = arguments.Kernel("sluice.some", f"kernel_{stride}")
    monkeypatch.setattr(variants, "parameters", lambda _: (("stride", False, True, False),))
    call = SimpleNamespace(kernel=kernel, arguments={"stride": stride}, options={})
    assert variants.variant(call).parameters[0].kind == kind


def _choice(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A choice whose q and k must begin at a multiple of 16 bytes."""
    monkeypatch.setattr(dispatch, "explain", lambda *_: None)
    choice = object.__new__(dispatch.Choice)
    choice.spec, choice.backend = SimpleNamespace(TENSORS=("q", "k", "g"), op="prefill"), None
    choice.aligned, choice.check_values, choice.always_checks = [0, 1], None, False
    choice.warning, choice._elsewhere = None, {}
    monkeypatch.setattr(dispatch, "Choice", _Elsewhere)
    return choice


class _Elsewhere:
    warning = None

    def __init__(self, *_: Any, misplaced: tuple[str, ...]) -> None:
        self.misplaced = misplaced


def test_every_address_decides_for_itself_and_by_16_bytes(monkeypatch):
    choice, memory = _choice(monkeypatch), torch.zeros(64, dtype=torch.float16)
    good, eight, two = memory[:8], memory[4:12], memory[1:9]
    assert good.data_ptr() % 16 == 0
    assert choice.ready([good, good, two], False) is choice
    for tensors, names in (
        ([eight, good, good], ("q",)),
        ([good, eight, good], ("k",)),
        ([two, eight, good], ("q", "k")),
        ([eight, good, two], ("q",)),
    ):
        assert choice.ready(tensors, False).misplaced == names
