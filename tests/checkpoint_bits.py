"""Whether a checkpoint has the bits of a call that ended there, wherever it lies."""

from __future__ import annotations

import torch
from torch import Tensor

import sluice
from sluice.testing.compare import assert_same_bits
from tests.suite import DEVICE

LENGTHS = (5, 70, 13, 1)
POSITIONS = ((5, 3), (64, 67), (11, 13), (1, 1))


def check(
    backend: str, dtype: torch.dtype, size: tuple[int, int], heads: int = 8, per_key: bool = False
) -> None:
    """Two checkpoints of each sequence, one of them often at its end."""
    gen = torch.Generator().manual_seed(0)
    (K, V), tokens, N = size, sum(LENGTHS), len(LENGTHS)

    def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, generator=gen).to(DEVICE, dtype)

    shapes = {"q": K, "k": K, "v": V}
    call = {name: random(1, tokens, heads, width, dtype=dtype) for name, width in shapes.items()}
    gates = (K,) if per_key else ()
    call["g"] = -random(1, tokens, heads, *gates).abs()
    call["beta"] = random(1, tokens, heads).sigmoid()
    pool = random(3 * N, heads, V, K)
    own, kept = torch.arange(N, device=DEVICE), torch.arange(N, 3 * N, device=DEVICE).view(N, 2)
    places = torch.tensor(POSITIONS, device=DEVICE)
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0)
    options = {"batch_invariant": True, "normalize_qk": True, "backend": backend}
    got = pool.clone()
    sluice.prefill(
        **call, state=got, slots=own, cu_seqlens=bounds.to(DEVICE), cu_seqlens_cpu=bounds,
        checkpoints=sluice.Checkpoints(kept, positions=places), **options,
    )  # fmt: skip
    for n, (start, length) in enumerate(zip(bounds.tolist(), LENGTHS, strict=False)):
        for j, end in enumerate((*POSITIONS[n], length)):
            alone = pool.clone()
            some = {name: x[:, start : start + end] for name, x in call.items()}
            sluice.prefill(**some, state=alone, slots=own[n : n + 1], **options)
            row = kept[n, j] if j < 2 else own[n]
            assert_same_bits(got[row], alone[n], f"sequence {n} after {end} of {length} tokens")
