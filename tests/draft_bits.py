"""Whether ``verify`` and ``commit`` leave the bits of ``decode``, however the tokens lie."""

from __future__ import annotations

import torch
from torch import Tensor

import sluice
from sluice.testing.compare import assert_same_bits
from tests.suite import DEVICE


def check(
    backend: str,
    size: tuple[int, int],
    n: int,
    dtype: torch.dtype = torch.float32,
    state_dtype: torch.dtype = torch.bfloat16,
    layout: str = "vk",
) -> None:
    """Tokens in views with odd strides, copied, and one row at a time: the same bits.

    A state of 16 bits hides most differences of float32, so many rows are compared, and outputs.
    """
    gen = torch.Generator().manual_seed(0)

    def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, generator=gen).to(DEVICE, dtype)

    (K, V), rows, T = size, 48, 4
    x = random(rows, T, 2 * K + V + 1, dtype=dtype)[..., 1 : 1 + 2 * K + V]
    q, k, v = (part.unflatten(-1, (1, -1)) for part in x.split((K, K, V), -1))
    gates = {"g": -random(rows, T, 1).abs(), "beta": random(rows, T, 1).sigmoid()}
    views = {"q": q, "k": k, "v": v, **gates}
    options = {"normalize_qk": True, "backend": backend, "state_layout": layout}
    slots = torch.arange(rows, device=DEVICE)
    pool = random(rows, 1, *((V, K) if layout == "vk" else (K, V)), dtype=state_dtype)
    want = pool.clone()
    o, draft = sluice.verify(**views, state=want, slots=slots, **options)
    sluice.commit(draft, torch.full_like(slots, n), backend=backend)
    first = {name: part[:, :n] for name, part in views.items()}
    copies = {
        name: part.clone(memory_format=torch.contiguous_format) for name, part in first.items()
    }
    for call, step in ((first, rows), (first, 1), (copies, rows), (copies, 1)):
        got = pool.clone()
        for i in range(0, rows, step):
            some = {name: part[i : i + step] for name, part in call.items()}
            at = slots[i : i + step].clone()
            o2, _ = sluice.decode(**some, state=got, slots=at, **options)
            if backend != "reference":  # the contract promises it of states alone
                assert_same_bits(o2, o[i : i + step, :n], f"o of {step} rows from {i} on")
        assert_same_bits(got, want, f"states, {step} rows at a time")
