"""No memory left in the middle of a call: an error, states as they were, the next call right."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import sluice
from sluice import open_drafts
from sluice.state_pool import PoolGeometry, StatePool
from sluice.testing import cases
from sluice.testing.case import Case, whole_storage
from tests.bad_luck.luck import Scarce

OPS = ("prefill", "decode", "verify", "causal_conv1d", "conv_qkv", "rms_norm_gated", "step")
MOST = 6
"""Places of one call at which memory ends; of more, as many evenly spread ones."""


def case_of(op: str) -> Case:
    """The first case of an operator that writes a state, if any does."""
    found = cases.select(op)
    return next((case for case in found if case.state in ("rows", "pool")), found[0])


def spread(number: int) -> list[int]:
    step = max(1, -(-number // MOST))
    return list(range(0, number, step))


def served(case: Case, backend: str, everywhere: bool = False) -> int:
    """How often a call of this case asks for memory."""
    case.run(sluice, case.inputs(torch.float32, "cpu"), backend=backend)  # bound
    inputs = case.inputs(torch.float32, "cpu")
    with Scarce(None, everywhere) as all_calls:
        case.run(sluice, inputs, backend=backend)
    assert all_calls.seen > 0
    return all_calls.seen


@pytest.mark.parametrize("op", OPS)
def test_a_kernel_without_memory_changes_nothing_and_can_be_called_again(op):
    """All memory that a call needs is there before its first kernel starts."""
    pytest.importorskip("numba")
    case = case_of(op)
    for number in spread(served(case, "cpu")):
        inputs = case.inputs(torch.float32, "cpu")
        expected = case.expected(inputs)
        with Scarce(number), pytest.raises(torch.OutOfMemoryError):
            case.run(sluice, inputs, backend="cpu")
        for name, pool in expected.pools.items():
            same = whole_storage(pool.tensor).view(torch.uint8), pool.before.view(torch.uint8)
            assert torch.equal(*same), f"{name} after allocation {number} failed"
        case.check(case.run(sluice, inputs, backend="cpu"), expected)


@pytest.mark.parametrize(
    ("backend", "op"), [("chunked", "prefill"), *(("reference", op) for op in OPS)]
)
def test_plain_torch_without_memory_is_an_error_and_other_rows_are_as_they_were(backend, op):
    """It allocates while it computes, so rows that the call writes may be half written."""
    case = case_of(op)
    for number in spread(served(case, backend, everywhere=True)):
        inputs = case.inputs(torch.float32, "cpu")
        expected = case.expected(inputs)
        grad = torch.is_grad_enabled()
        with Scarce(number, everywhere=True), pytest.raises(torch.OutOfMemoryError):
            case.run(sluice, inputs, backend=backend)
        assert torch.is_grad_enabled() == grad
        for name, pool in expected.pools.items():
            pool.assert_rest_unchanged(name)
    inputs = case.inputs(torch.float32, "cpu")
    expected = case.expected(inputs)
    case.check(case.run(sluice, inputs, backend=backend), expected)


# ---- a GPU's path, with a driver that keeps what it is given -------------------------------------


def prompt() -> dict[str, Any]:
    """A prefill that needs a workspace."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 70, heads, 128).half() for heads in (1, 1, 2))
    g, beta = -torch.rand(2, 70, 2), torch.rand(2, 70, 2)
    return {"q": q, "k": k, "v": v, "g": g, "beta": beta, "state": torch.zeros(2, 2, 128, 128)}


@pytest.mark.parametrize("backend", ["hopper", "triton"])
def test_without_memory_for_outputs_or_workspace_no_kernel_starts(backend, driver):
    sluice.prefill(**prompt(), backend=backend)  # bound, which allocates too
    driver.launched.clear()
    inputs = prompt()
    with Scarce(None) as all_calls:
        sluice.prefill(**inputs, backend=backend)
    kernels = [launched.kernel for launched in driver.launched]
    assert len(kernels) > 1
    assert all_calls.seen >= 2  # the output and the workspace
    for number in range(all_calls.seen):
        inputs = prompt()
        driver.launched.clear()
        with Scarce(number), pytest.raises(torch.OutOfMemoryError):
            sluice.prefill(**inputs, backend=backend)
        assert driver.launched == []
        sluice.prefill(**inputs, backend=backend)
        assert [launched.kernel for launched in driver.launched] == kernels


def test_a_commit_without_memory_leaves_the_draft_to_be_committed(driver):
    """A draft is used up by a commit that ran, and by no other."""
    x, state = torch.randn(1, 3, 2, 16).half(), torch.zeros(1, 2, 16, 16)
    g, beta, accepted = -torch.rand(1, 3, 2), torch.rand(1, 3, 2), torch.tensor([2])
    _, draft = sluice.verify(x, x, x, g, beta, state=state, backend="triton")
    driver.result = 2  # CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(RuntimeError, match="CUDA error 2"):
        sluice.commit(draft, accepted, backend="triton")
    driver.result = 0
    sluice.commit(draft, accepted, backend="triton")
    with pytest.raises(sluice.ContractError, match="a draft whose rows are as verify read them"):
        sluice.commit(draft, accepted, backend="triton")
    assert not open_drafts._lock.locked()


# ---- the pool ------------------------------------------------------------------------------------

GEOMETRY = PoolGeometry(layers=2, num_v_heads=2, conv_channels=12, head_k_dim=2, head_v_dim=2)


def test_a_pool_without_memory_for_a_copy_is_as_it_was():
    pool = StatePool(GEOMETRY, 4)
    mine = pool.allocate(2)
    pool.recurrent[:, mine] = 3.0
    for call in (lambda: pool.snapshot(mine), lambda: pool.draft_buffers(2)):
        with Scarce(None) as all_calls:
            call()
        assert all_calls.seen > 0
        for number in range(all_calls.seen):
            with Scarce(number), pytest.raises(torch.OutOfMemoryError):
                call()
    assert pool.allocated == mine
    assert pool.available == 2
    assert pool.snapshot(mine).recurrent.eq(3).all()


# ---- on a GPU ------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_full_gpu_is_an_error_and_the_next_call_is_right():
    """All memory is taken but less than a prompt's output needs; then it is given back."""
    torch.manual_seed(0)
    shapes = [(1, 16384, heads, 128) for heads in (16, 16, 32)]
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes)
    g, beta = -torch.rand(1, 16384, 32, device="cuda"), torch.rand(1, 16384, 32, device="cuda")
    start = torch.randn(1, 32, 128, 128, device="cuda")

    def run(state):
        return sluice.prefill(q, k, v, g, beta, state=state, normalize_qk=True)[0]

    expected = start.clone()
    output = run(expected).cpu()
    expected = expected.cpu()
    state = start.clone()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    taken, size = [], torch.cuda.mem_get_info()[0]
    while size >= 2**20:
        try:
            taken.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            size //= 2
    for _ in range(3):
        with pytest.raises(torch.OutOfMemoryError):
            run(state)
    taken.clear()
    torch.cuda.empty_cache()
    assert torch.equal(state, start)
    assert torch.equal(run(state).cpu(), output)
    assert torch.equal(state.cpu(), expected)
