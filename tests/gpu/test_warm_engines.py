"""After an engine's warm-up no batch compiles a kernel on a GPU (row 10). Nothing runs here.

Batches as the engines make them go through the plug-ins' own code, on tensors without memory. What
machine code their calls need follows from shapes, strides, and where tensors begin.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("triton.experimental.gluon.nvidia.hopper")

from sluice import ops
from sluice.backends import hopper
from sluice.backends import triton as portable
from sluice.integrations.sglang import drafts as sglang_drafts
from sluice.integrations.sglang import serve as sglang
from sluice.integrations.vllm import batch, serve, warm
from sluice.layers.qwen import QwenShape
from sluice.model_calls import ModelCall
from tests.gpu.cross import DEVICE, gpu_like
from tests.gpu.needed import checked, compiled_for, nearest, needed
from tests.integrations.vllm_layer import decode_batch, draft_batch, prompt_batch

pytestmark = pytest.mark.skipif(portable.interpreted(), reason="kernels have no signature there")
HK, HV, K, W, PAGES = 2, 4, 128, 4, 2048
D = (2 * HK + HV) * K
ROWS = (1, 2, 3, 8, 9, 17, 65, 130, 300, 1030)
PROMPTS = (
    ([1], 0), ([1, 1, 2], 0), ([3, 5], 0), ([7] * 40, 0), ([130], 0), ([5000], 0), ([3000] * 9, 0),
    ([1], 1), ([2, 5], 3), ([64], 7), ([500, 1], 40), ([8192], 300), ([40000], 1),
)  # fmt: skip
"""Lengths of prompts, and how many sequences with one token come before them."""


def meta(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*size, dtype=dtype, device="meta")


@pytest.fixture(autouse=True)
def _nothing_is_clean():
    """Nothing is computed here."""


@pytest.fixture(params=["hopper", "triton"])
def package(request) -> Iterator[Any]:
    """An H200 with this backend's prefill."""
    with gpu_like("sm_90"):
        yield {"hopper": hopper, "triton": portable}[request.param]


def missing(package: Any, plan: list[ModelCall], requests: dict[str, Any]) -> list[object]:
    """What calls of requests need that the plan does not compile."""
    ready = compiled_for(package, (call.spec(DEVICE) for call in plan))
    assert ready
    found: dict[Any, str] = {}
    for name, request in requests.items():
        made = checked(request)
        assert made
        for call in made:
            for variant in needed(package, call, DEVICE) - ready:
                found.setdefault(variant, f"{call.spec.op}: {name}")
    return [(name, nearest(variant, ready)) for variant, name in found.items()]


# ------------------------------------------------------------------------------------------- vLLM


def vllm_layer(order: str, drafts: int, invariant: bool) -> serve.Layer:
    """Both states lie in one page, which is padded."""
    L = W - 1 + drafts
    conv, state = L * D * 2, HV * K * K * 4
    page = -(-(conv + state) // 4096) * 4096
    raw = torch.empty(PAGES * page, dtype=torch.uint8, device="meta")
    pages = raw.view(torch.bfloat16).as_strided((PAGES, L, D), (page // 2, D, 1))
    states = raw.view(torch.float32).as_strided(
        (PAGES, HV, K, K), (page // 4, K * K, K, 1), conv // 4
    )
    shape = QwenShape("test", 16, HK, HV, 1, (0,), head_k_dim=K, head_v_dim=K, order=order)
    gates = {"dtype": torch.float32}
    return serve.Layer(
        shape, meta(D, W), meta(HV, **gates), meta(HV), meta(K), pages.transpose(1, 2), states,
        invariant,
    )  # fmt: skip


class Request(NamedTuple):
    """A batch of vLLM's, served by a layer."""

    layer: serve.Layer
    metadata: Any
    pair: bool = False  # whether the gates' projection gives two tensors

    def __call__(self) -> None:
        for name, x in vars(self.metadata).items():
            if isinstance(x, torch.Tensor):
                setattr(self.metadata, name, x.to("meta"))
        found, s = batch.read(self.metadata), self.layer.shape
        n = found.length + 5  # a graph's tokens are more than the batch's
        qkvz, ba = meta(n, s.conv_channels + s.value_dim), meta(n, 2 * HV)
        gates: Any = tuple(x.contiguous() for x in ba.chunk(2, dim=-1)) if self.pair else ba
        serve.run(ops, self.layer, found, qkvz, gates, meta(n, HV, K))


def vllm_requests(layer: serve.Layer, drafts: int, kept: bool) -> dict[str, Request]:
    made = {}
    for N in ROWS:
        made[f"decode {N}"] = Request(layer, decode_batch([1] * N))
    for lengths, n in PROMPTS:
        N = len(lengths) + n
        checkpoint = SimpleNamespace(
            state_indices=meta(N, dtype=torch.int32), checkpoint_offsets=meta(N, dtype=torch.int32)
        )
        for more in [{}, {"checkpoint": checkpoint}] if kept else [{}]:
            rows = prompt_batch([1] * N, [1] * n + lengths, [True] * N, n, **more)
            made[f"{lengths[:3]} after {n}, {list(more)}"] = Request(layer, rows)
    if layer.shape.order == "split":
        made["gates apart"] = Request(layer, prompt_batch([1], [90], [True]), True)
        made["gates apart, decode"] = Request(layer, decode_batch([1] * 3), True)
    for N in ROWS if drafts else ():
        T = drafts + 1
        made[f"drafts {N}"] = Request(layer, draft_batch([[1] * T] * N, [T] * N, [1] * N))
        for t in range(1, T):  # not all sequences have all drafts
            made[f"{t} of {T} tokens, {N}"] = Request(
                layer, draft_batch([[1] * T] * N, [t] * N, [1] * N)
            )
        n = 100
        beside = draft_batch(
            [[1] * T] * N,
            [T] * N,
            [1] * N,
            num_actual_tokens=N * T + n,
            num_prefills=2,
            non_spec_query_start_loc=torch.tensor([0, 1, n], dtype=torch.int32),
            non_spec_state_indices_tensor=torch.tensor([1, 2], dtype=torch.int32),
            has_initial_state=torch.tensor([False, True]),
            non_spec_token_indx=torch.arange(n),
            spec_token_indx=torch.arange(n, n + N * T),
        )
        made[f"drafts {N} beside prompts"] = Request(layer, beside)
    return made


@pytest.mark.parametrize("invariant", [False, True], ids=("", "invariant"))
@pytest.mark.parametrize("drafts", [0, 2, 7])
@pytest.mark.parametrize("order", ["split", "interleaved"])
def test_row_10_no_batch_of_vllm_needs_a_kernel_that_its_warm_up_leaves_out(
    package, order, drafts, invariant
):
    layer = vllm_layer(order, drafts, invariant)
    plan = warm.plan(layer, torch.bfloat16, drafts, True, True)
    assert missing(package, plan, vllm_requests(layer, drafts, True)) == []


# ------------------------------------------------------------------------------------------ SGLang


def sglang_layers(drafts: int) -> tuple[sglang.Layer, sglang_drafts.Drafts | None]:
    pools = meta(3, 64, D, W - 1), meta(3, 64, HV, K, K, dtype=torch.float32)
    rates = meta(HV, dtype=torch.float32), meta(HV)
    layer = sglang.Layer(
        (HK, HV, K, K), meta(D, W), None, "silu", *rates, pools[0][1], pools[1][1], 0
    )
    if not drafts:
        return layer, None
    space = meta(3, 80, drafts + 1, HV, K, K, dtype=torch.float32)
    buffers = sglang_drafts.buffers_within(space, layer, torch.bfloat16)
    assert buffers is not None
    return layer, sglang_drafts.Drafts(buffers, pools[1], pools[0], 0)


def sglang_requests(layer: sglang.Layer, drafts: sglang_drafts.Drafts | None) -> dict[str, Any]:
    slots, made = meta(PAGES, dtype=torch.int32), {}

    def decode(N: int, projected: bool) -> None:
        x, ba = meta(N, D + HV * K)[:, :D] if projected else meta(N, D), meta(N, 2 * HV)
        b, a = ba.chunk(2, dim=-1) if projected else (meta(N, HV), meta(N, HV))
        sglang.decode(ops, layer, x, b, a, slots[:N])

    def extend(lengths: list[int], kept: bool) -> None:
        n, N = sum(lengths), len(lengths)
        mask, lasts = meta(N, dtype=torch.bool), meta(N, dtype=torch.int64)
        some = sglang.checkpoints(mask, lasts, meta(N, dtype=torch.int32), 0) if kept else None
        borders, known = meta(N + 1, dtype=torch.int32), meta(N, dtype=torch.bool)
        p = sglang.Prompts(slots[:N], borders, known, some)
        sglang.extend(ops, layer, meta(n, D), meta(n, HV), meta(n, HV), p)

    def verify(N: int) -> None:
        assert drafts is not None
        T = drafts.buffers.k.shape[2]
        b, a = (meta(N * T, HV).unflatten(0, (N, T)) for _ in "ba")
        x = meta(N * T, D).unflatten(0, (N, T))
        place = drafts.buffers.layer(2)
        sglang_drafts.verify(ops, layer, place, x, b, a, slots[:N])
        steps = meta(N, dtype=torch.int64)
        sglang_drafts.commit(ops, drafts, slots[:N], steps, steps, steps)

    for N in ROWS:
        made[f"decode {N}"] = lambda N=N: decode(N, False)
        made[f"decode {N} with the pair"] = lambda N=N: decode(N, True)
        if drafts:
            made[f"verify {N}"] = lambda N=N: verify(N)
    for lengths, n in PROMPTS:
        for kept in (False, True):
            every = [1] * n + lengths
            made[f"{every[:3]}, {kept}"] = lambda every=every, kept=kept: extend(every, kept)
    return made


@pytest.mark.parametrize("drafts", [0, 3])
def test_row_10_no_batch_of_sglang_needs_a_kernel_that_its_warm_up_leaves_out(package, drafts):
    layer, kept = sglang_layers(drafts)
    plan = sglang.plan(layer, torch.bfloat16, torch.int32, False, True)
    if kept is not None:
        plan += sglang_drafts.plan(layer, kept, torch.bfloat16, torch.int32)
    assert missing(package, plan, sglang_requests(layer, kept)) == []
