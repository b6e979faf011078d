"""A buffer for results shares no memory with an input, a state or another buffer."""

from __future__ import annotations

import itertools

import pytest
import torch

import sluice
from sluice.calls import meta_of
from sluice.contract.errors import ContractError
from sluice.contract.meta import apart

N, T, H, K = 2, 3, 2, 8


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


def delta(op: str):
    x, pool = random(N, T, H, K), random(4, H, K, K)
    gate = -random(N, T, H).abs()
    call = {"q": x, "k": x.clone(), "v": x.clone(), "g": gate, "beta": gate.exp(), "state": pool}
    inside = pool.view(-1)[: x.numel()].view(x.shape)
    return getattr(sluice, op), call, {"q": x, "v": call["v"], "state": inside}


def conv():
    x, pool = random(N, T, 48), random(4, 48, 3)
    call = {"x": x, "weight": random(48, 4), "state": pool}
    inside = pool.view(-1)[: x.numel()].view(x.shape)
    return sluice.causal_conv1d, call, {"x": x, "state": inside}


def norm():
    x = random(N, T, 48)
    z = random(N, T, 48, 1).squeeze(-1)
    return sluice.rms_norm_gated, {"x": x, "z": z, "weight": random(48)}, {"x": x, "z": z}


def step():
    # 8 wide: 2 key heads, 2 value heads
    pool, window = random(4, H, K, K), random(4, 48, 3)
    call = {"qkvz": random(N, 64), "ba": random(N, 4), "conv_state": window, "state": pool}
    call |= {"conv_weight": random(48, 4), "A_log": random(2), "dt_bias": random(2)}
    call["norm_weight"] = random(K)
    places = {"state": pool, "conv_state": window, "qkv": call["qkvz"]}
    return sluice.step, call, {n: x.view(-1)[: N * 16].view(N, 16) for n, x in places.items()}


CALLS = {
    "prefill": lambda: delta("prefill"),
    "decode": lambda: delta("decode"),
    "verify": lambda: delta("verify"),
    "conv": conv,
    "norm": norm,
    "step": step,
}
CASES = [(name, part) for name, make in CALLS.items() for part in make()[2]]


@pytest.mark.parametrize(("name", "part"), CASES)
def test_out_inside_of_another_tensor_is_refused(name, part):
    function, call, outs = CALLS[name]()
    before = {key: x.clone() for key, x in call.items()}
    with pytest.raises(ContractError, match=rf"out: expected memory of its own, apart from {part}"):
        function(**call, out=outs[part])
    for key, x in call.items():
        assert torch.equal(x, before[key]), f"{key} was changed by a call that raised"


@pytest.mark.parametrize("name", CALLS)
def test_out_beside_the_other_tensors_is_filled(name):
    function, call, outs = CALLS[name]()
    out = torch.full_like(next(iter(outs.values())), torch.nan)
    result = function(**call, out=out)
    result = result[0] if isinstance(result, tuple) else result
    assert result.data_ptr() == out.data_ptr()
    assert out.isfinite().all()


def test_columns_of_one_buffer_are_apart_and_overlapping_ones_are_not():
    buffer, w = random(1, 5, 32), random(8, 4)
    want, _ = sluice.causal_conv1d(buffer[..., :8].clone(), w)
    got, _ = sluice.causal_conv1d(buffer[..., :8], w, out=buffer[..., 8:16])
    assert torch.equal(got, want)
    with pytest.raises(ContractError, match="out: expected memory of its own, apart from x"):
        sluice.causal_conv1d(buffer[..., :8], w, out=buffer[..., 7:15])


def test_buffers_of_conv_qkv_are_apart_from_each_other():
    x, w, heads = random(1, 5, 48), random(48, 4), {"num_k_heads": 2, "num_v_heads": 2}
    whole = torch.empty(1, 5, 48)
    views = [part.unflatten(-1, (2, 8)) for part in whole.split(16, -1)]
    sluice.conv_qkv(x, w, **heads, out=(*views, None, None))
    with pytest.raises(ContractError, match="memory of its own, apart from"):
        sluice.conv_qkv(x, w, **heads, out=(views[0], views[0], views[2], None, None))


def test_draft_buffers_lie_apart_from_the_pool():
    x, pool = random(N, T, H, K), random(4, H, K, K)
    inside = pool.view(-1)[: 2 * T * H * K].view(2, T, H, K)
    buffers = sluice.DraftBuffers(inside, torch.zeros(2, T, H, K))
    with pytest.raises(ContractError, match=r"buffers.k: expected memory of its own, apart from s"):
        sluice.verify(x, x.clone(), x.clone(), state=pool, buffers=buffers)


def test_apart_never_says_so_of_two_views_that_share_an_element():
    """Against every pair of small views, element by element."""
    views = []
    for shape in ((4,), (2, 3), (3, 2), (2, 2, 2)):
        for strides in itertools.product((1, 2, 3, 5, 6), repeat=len(shape)):
            views.append((shape, strides))
    storage = torch.zeros(200, dtype=torch.int16)

    def elements(shape, strides, start):
        ranges = itertools.product(*map(range, shape))
        return {start + sum(map(int.__mul__, i, strides)) for i in ranges}

    proved = 0
    for n, (a, b) in enumerate(itertools.product(views, views)):
        distance = n % 23 - 11
        first = meta_of(storage.as_strided(*a, 50))
        second = meta_of(storage.as_strided(*b, 50 + distance))
        shared = elements(*a, 50) & elements(*b, 50 + distance)
        if apart(first, second, 2 * distance):
            proved += 1
            assert not shared, (a, b, distance)
    assert proved > 1000
