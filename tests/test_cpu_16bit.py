"""16-bit numbers on the CPU: rounded to nearest even, the same bits on every path."""

from __future__ import annotations

import pytest
import torch

import sluice

pytest.importorskip("numba")

HALVES = (torch.bfloat16, torch.float16)
HEADS, WIDTH = 2, 128


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def bits(x):
    return x.view(torch.int16 if x.element_size() == 2 else torch.int32)


def awkward(count):
    """Ties, their neighbours, subnormal numbers, numbers that round to infinity, both zeros."""
    patterns = []
    for high in (0x3F80, 0x3F81, 0x0001, 0x0080, 0x7F7F, 0x4049, 0x3380, 0x38FF, 0x477F):
        for low in (0x0000, 0x7FFF, 0x8000, 0x8001, 0x1000, 0x0FFF, 0x3000, 0xFFFF):
            patterns += [high << 16 | low, (high | 0x8000) << 16 | low]
    patterns += [0, 0x80000000]
    words = torch.tensor(patterns, dtype=torch.int64).repeat(-(-count // len(patterns)))[:count]
    return words.to(torch.int32).view(torch.float32)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("place", [0, 1, 7, 8, 15, 16, 127])
def test_a_state_is_rounded_to_nearest_even(dtype, place):
    """With a key of one 1 and a state of zeros, the new state is v at that key."""
    q = torch.zeros(1, 1, HEADS, WIDTH)
    k = torch.zeros(1, 1, HEADS, WIDTH)
    k[..., place] = 1.0
    v = awkward(HEADS * WIDTH).view(1, 1, HEADS, WIDTH)
    g, beta = torch.zeros(1, 1, HEADS), torch.ones(1, 1, HEADS)
    state = torch.zeros(1, HEADS, WIDTH, WIDTH, dtype=dtype)
    _, state = sluice.decode(q, k, v, g, beta, state=state, backend="cpu")
    found = state[0, ..., place]
    assert torch.equal(bits(found), bits((v[0, 0] + 0.0).to(dtype)))  # 0 times 1 plus -0 is 0
    state[..., place] = 0
    assert not state.any()


@pytest.mark.parametrize("dtype", HALVES)
def test_a_state_that_nothing_is_written_to_keeps_its_bits(dtype):
    x = torch.randn(1, 1, HEADS, WIDTH)
    g, beta = torch.zeros(1, 1, HEADS), torch.zeros(1, 1, HEADS)
    words = torch.arange(HEADS * WIDTH * WIDTH, dtype=torch.int64) * 31 % 65536
    state = words.to(torch.int16).view(dtype).view(1, HEADS, WIDTH, WIDTH).clone()
    state[~(state.abs() < 1e30)] = 0  # no product is infinite
    before = state.clone()
    sluice.decode(x, x, x, g, beta, state=state, backend="cpu")
    same = (bits(state) == bits(before)) | ((state == 0) & (before == 0))  # -0 + 0 is 0
    assert same.all()


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@pytest.mark.parametrize("fault", [None, "nan", "inf", "-inf"])
def test_decode_of_one_token_is_verify_and_commit(dtype, fault):
    """The same bits, also where rows hold what is no number."""
    generator = torch.Generator().manual_seed(7)
    q, k, v = (torch.randn(3, 1, HEADS, WIDTH, generator=generator).to(dtype) for _ in "qkv")
    g, beta = -torch.rand(3, 1, HEADS, generator=generator), torch.rand(3, 1, HEADS)
    state = torch.randn(3, HEADS, WIDTH, WIDTH, generator=generator).to(dtype)
    if fault is not None:
        state[0, 1, 5, 70] = float(fault)
        state[2, 0, 127, 0] = float(fault)
    other = state.clone()
    options = {"normalize_qk": True, "backend": "cpu"}
    out, state = sluice.decode(q, k, v, g, beta, state=state, **options)
    drafted, draft = sluice.verify(q, k, v, g, beta, state=other, **options)
    sluice.commit(draft, torch.ones(3, dtype=torch.int64), backend="cpu")
    assert torch.equal(bits(out), bits(drafted))
    assert torch.equal(bits(state), bits(other))
    assert state.isfinite().all() == (fault is None)
    rows = (~state.isfinite()).any(-1).sum()
    assert rows == (0 if fault is None else 2)


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
def test_a_fresh_state_has_the_bits_of_a_state_of_zeros(dtype):
    q, k, v = (torch.randn(2, 1, HEADS, WIDTH).to(dtype) for _ in "qkv")
    g, beta = -torch.rand(2, 1, HEADS), torch.rand(2, 1, HEADS)
    pool = torch.zeros(2, HEADS, WIDTH, WIDTH, dtype=dtype)
    zeros, garbage = pool, torch.full_like(pool, 3.0)
    options = {"slots": torch.tensor([0, 1]), "backend": "cpu"}
    first, zeros = sluice.decode(q, k, v, g, beta, state=zeros, **options)
    fresh = torch.zeros(2, dtype=torch.bool)
    second, garbage = sluice.decode(q, k, v, g, beta, state=garbage, has_state=fresh, **options)
    assert torch.equal(bits(first), bits(second))
    assert torch.equal(bits(zeros), bits(garbage))


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@pytest.mark.parametrize("op", ["causal_conv1d", "conv_qkv"])
def test_a_convolution_in_pieces_has_the_bits_of_the_whole(op, dtype):
    """Tokens straight from memory, and tokens through lines of scratch memory."""
    heads, T = 4, 83
    D = 4 * heads * 64
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(1, T, D, generator=generator).to(dtype)
    weight, bias = (torch.randn(*n, generator=generator) for n in ((D, 4), (D,)))
    options = {"activation": "silu"} if op == "causal_conv1d" else {}
    if op == "conv_qkv":
        options = {"num_k_heads": heads, "num_v_heads": 2 * heads}
    window = torch.randn(1, D, 3, generator=generator)

    def run(parts):
        state, found, start = window.clone(), [], 0
        for count in parts:
            piece = x[:, start : start + count]
            out = getattr(sluice, op)(piece, weight, bias, state=state, backend="cpu", **options)
            outputs = out[:1] if op == "causal_conv1d" else out[:3]
            found.append([y for y in outputs if y is not None])
            start += count
        return [torch.cat(y, 1) for y in zip(*found, strict=True)], state

    whole, last = run([T])
    pieces, final = run([5] * 16 + [3])
    for a, b in zip(whole, pieces, strict=True):
        assert torch.equal(bits(a), bits(b))
    assert torch.equal(last, final)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("op", ["decode", "verify", "prefill"])
def test_a_state_is_rounded_once_per_call(op, dtype):
    """Several tokens on a 16-bit state: those on the same state in float32, rounded at the end."""
    T = 70 if op == "prefill" else 4
    generator = torch.Generator().manual_seed(11)
    q, k, v = (torch.randn(2, T, HEADS, WIDTH, generator=generator) for _ in "qkv")
    g, beta = (torch.rand(2, T, HEADS, generator=generator) for _ in "gb")
    short = torch.randn(2, HEADS, WIDTH, WIDTH, generator=generator).to(dtype)
    wide = short.float()
    for state in (short, wide):
        found = getattr(sluice, op)(
            q, k, v, -0.01 * g, beta, state=state, normalize_qk=True, backend="cpu"
        )
        if op == "verify":
            sluice.commit(found[1], torch.full((2,), T), backend="cpu")
    assert torch.equal(bits(short), bits(wide.to(dtype)))
    assert not torch.equal(short.float(), wide)


@pytest.mark.parametrize("pattern", [0x7FFFFFFF, -1, 0x7F800001, 0x7FC00000])
@pytest.mark.parametrize("op", ["causal_conv1d", "rms_norm_gated"])
def test_every_nan_of_a_float32_weight_stays_one_in_bfloat16(op, pattern):
    """A NaN whose bits are all ones, rounded like a number, would be zero."""
    fault = torch.tensor([pattern], dtype=torch.int64).to(torch.int32).view(torch.float32)
    x, channels = torch.randn(1, 40, 4, 128).bfloat16(), (0, 1, 17, 127)
    if op == "causal_conv1d":
        weight = torch.randn(512, 4)
        weight[channels, 2] = fault
        found = sluice.causal_conv1d(x.flatten(2), weight, backend="cpu", activation="silu")
        found = (found[0] if isinstance(found, tuple) else found)[..., :128]
        assert found[:, 3:, channels].isnan().all()
    else:
        weight = torch.rand(128)
        weight[list(channels)] = fault
        found = sluice.rms_norm_gated(x, x, weight, backend="cpu")
        assert found[..., channels].isnan().all()
    rest = [i for i in range(128) if i not in channels]
    assert found[..., rest].isfinite().all()
