"""The calls with which Hopper's backward of prefill is tested: on a GPU, or in the emulator."""

from __future__ import annotations

import torch

from tests.training.calls import Call

USUAL = Call("usual", B=1, T=200, HQ=2, HK=2, HV=4, K=128, V=128, state=False)
"""From zero to a final state that nobody uses, with enough heads and gates: chunks of such calls
are hard by their keys alone, but for those of one token."""
GIVEN = USUAL.of(name="states, two value heads", HQ=1, HK=1, HV=2, state=True)
"""Given states: every chunk is hard."""
SAME = GIVEN.of(name="identical", keys="identical", rate=0.0, beta="one")
"""What queries ask of the states adds up from chunk to chunk, and cancels in dv and dbeta."""
ONE_BETA = USUAL.of(
    name="500 identical, one beta", T=500, HQ=1, HK=1, keys="identical", rate=0.0, beta=0.9
)
"""From zero, one beta near 1 for all tokens: the rounding errors of Bg agree, and dg is small."""
KINDS = [
    USUAL,
    GIVEN,
    USUAL.of(name="packed, raw", lengths=(5, 0, 64, 1, 130), raw=True),
    USUAL.of(name="packed, raw, states", lengths=(5, 0, 64, 1, 130), raw=True, state=True),
    USUAL.of(name="two rows, raw", B=2, T=130, raw=True, neg_eigval=True),
    USUAL.of(name="one value head", T=130, HQ=1, HK=1, HV=1),
    USUAL.of(name="one value head per key", T=130, HQ=4, HK=4),
    USUAL.of(name="four value heads per key", T=130, HQ=1, HK=1),
    USUAL.of(name="one query head", T=130, HQ=1),
    USUAL.of(name="kv, no norm, states", layout="kv", normalize=False, scale=0.3, state=True),
    USUAL.of(name="no decay", decay=None),
    *[USUAL.of(name=f"{T} tokens", T=T) for T in (1, 63, 64, 65)],
]
FAINT = GIVEN.of(name="10 tokens, decay 20", T=10, rate=20.0)
"""The gradient of its initial state is at most 1e-14: float16 has no such number."""
VANISHING = [
    SAME.of(name="70 identical", T=70),
    SAME.of(name="70 identical, decay 1", T=70, rate=1.0),
    SAME.of(name="129 identical", T=129),
    SAME.of(name="130 identical, no states", T=130, HV=4, decay=None, state=False),
    SAME.of(name="129 identical, no states", T=129, HV=4, rate=5.0, beta=0.98, state=False),
    USUAL.of(name="5 tokens", T=5, HQ=1, HK=1, rate=9.0),
    FAINT,
    GIVEN.of(name="185 tokens, four heads", T=185, HV=4, rate=20.0, beta="zero"),
    ONE_BETA,
    ONE_BETA.of(name="500 identical, beta 0.99", beta=0.99),
    ONE_BETA.of(name="70 identical, two rows", B=2, T=70, rate=1.0, beta=0.99),
    ONE_BETA.of(name="identical, packed", lengths=(5, 0, 130, 1, 70)),
]
"""What states, errors and Bg of 16 bits are not enough for: in these draws nearly all of dg, dbeta
or dq cancels. Each rule that makes a chunk hard has draws that no other mends: keys that repeat
(130 identical), one token (129, no states), few gates (5 tokens), given states (185 tokens). The
last four need both terms of Bg, and 0.99 products of two low terms (docs/kernels/backward.md)."""
OF_DTYPE = [(call, torch.bfloat16) for call in VANISHING]
OF_DTYPE += [(call, torch.float16) for call in VANISHING if call is not FAINT]
FAINT_BETA = USUAL.of(name="beta near 0", beta="small", scale=32.0)
"""With the usual scale, dq, dk and dv would be about 1.6e-6. float16 has them in steps of 6e-8, so
that rounding alone would leave 1e-2, and a kernel's small error would move some of them by a step.
"""
HARD = [
    SAME,
    GIVEN.of(name="repeated", T=500, HV=1, keys="repeated", rate=0.0, beta="one"),
    GIVEN.of(name="correlated", T=500, HV=1, keys="correlated", rate=0.001),
    USUAL.of(name="decay 20", rate=20.0),
    USUAL.of(name="beta 0", beta="zero"),
    FAINT_BETA,
]
SPLIT = [
    USUAL.of(name="split", T=500),
    USUAL.of(name="split, packed", lengths=(5, 0, 256, 1, 300), raw=True),
    GIVEN.of(name="split, repeated", T=300, keys="repeated", rate=0.0, beta="one"),
    SAME.of(name="split, identical", T=300),
    ONE_BETA.of(name="split, one beta"),
]
"""To be split into segments of 128 tokens."""
MIXED = USUAL.of(name="hard and not", lengths=(65, 64, 0, 1, 130, 1, 100))
FEW_PROGRAMS = [
    MIXED,
    MIXED.of(name="hard and not, one head per key", HQ=4, HK=4),
    USUAL.of(name="many chunks", T=500),
    USUAL.of(
        name="packed, raw, odd", lengths=(5, 0, 64, 1, 130, 0, 0, 77, 64), raw=True, HQ=4, HK=4
    ),
    USUAL.of(name="no decay, many", T=300, HQ=1, HK=1, HV=5, decay=None, normalize=False),
]
"""To be gone through by two programs: one meets hard chunks after others, and empty ones. With
random keys the only chunk of a sequence is hard."""
