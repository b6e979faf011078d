"""Pools and helpers that the tests of StatePool share."""

from __future__ import annotations

from dataclasses import replace

import torch

from sluice.state_pool import (
    PoolGeometry,
    StatePool,
)

# V != K, D != L, 2 layers, 2 dtypes: a transposed, shifted or reinterpreted copy cannot pass
SMALL = PoolGeometry(
    layers=2,
    num_v_heads=2,
    conv_channels=5,
    head_k_dim=3,
    head_v_dim=4,
    conv_columns=3,
    state_dtype=torch.float32,
    conv_dtype=torch.bfloat16,
)
P = 6


def paged(geometry=SMALL, slots=P, fill=0xFF):
    """Tensors as in vLLM: one byte slab per layer, and in each page conv [L, D], then state."""
    conv_bytes = 5 * 3 * 2
    state_at, page = 32, 32 + 2 * 4 * 3 * 4 + 16  # a gap of 2 bytes, and 16 after
    assert conv_bytes <= state_at
    slabs = [torch.full((slots * page,), fill, dtype=torch.uint8) for _ in range(geometry.layers)]
    conv, state = [], []
    for slab in slabs:
        conv.append(slab.view(torch.bfloat16).as_strided((slots, 3, 5), (page // 2, 5, 1)))
        shape, strides = (slots, 2, 4, 3), (page // 4, 12, 3, 1)
        state.append(slab.view(torch.float32).as_strided(shape, strides, state_at // 4))
    return slabs, conv, state


def paged_pool():
    _, conv, state = paged()
    return StatePool.from_tensors(conv, state, conv_order="ld", reserve_slot_0=True)


VARIANTS = {
    "plain": lambda: StatePool(SMALL, P),
    "kv": lambda: StatePool(SMALL, P, state_layout="kv"),
    "vllm_order_reserved": lambda: StatePool(SMALL, P, conv_order="ld", reserve_slot_0=True),
    "paged_reserved": paged_pool,
}


def bits(tensor):
    """A copy that compares NaN with NaN and 0 with -0 by their bits."""
    ints = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
    return tensor.clone(memory_format=torch.contiguous_format).view(ints)


def read(pool, row):
    """Bits of one row in every layer, through the views that operators get: conv, state as vk."""
    pairs = [pool.layer(i) for i in range(pool.geometry.layers)]
    state = [s[row].mT if pool.state_layout == "kv" else s[row] for _, s in pairs]
    return torch.stack([bits(c[row]) for c, _ in pairs]), torch.stack([bits(s) for s in state])


def write(pool, row, seed):
    """Arbitrary bits (NaN, infinities, subnormals among them) into one row of every layer."""
    gen = torch.Generator().manual_seed(seed)
    for i in range(pool.geometry.layers):
        for tensor in pool.layer(i):
            size = tensor[row].numel() * tensor.element_size()
            raw = torch.randint(0, 256, (size,), generator=gen, dtype=torch.uint8)
            tensor[row] = raw.view(tensor.dtype).view(tensor[row].shape)


def poison(pool):
    """Fill every element of the pool with NaN."""
    for i in range(pool.geometry.layers):
        for tensor in pool.layer(i):
            tensor.fill_(float("nan"))


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def everything(pool):
    """Everything that a failed call must not change."""
    rows = [read(pool, row) for row in range(pool.slots)]
    marks = [(int(s), s.generation) for s in pool.allocated]
    return rows, marks, pool.available


def unchanged(pool, before):
    after = everything(pool)
    return after[1:] == before[1:] and all(map(same, after[0], before[0]))


def other_snapshot(**changes):
    pool = StatePool(replace(SMALL, **changes), 2)
    return pool.snapshot(pool.allocate())
