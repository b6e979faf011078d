"""The calls with which Hopper's backward of prefill is tested: on a GPU, or in the emulator."""

from __future__ import annotations

from tests.training.calls import Call

USUAL = Call("usual", B=1, T=200, HQ=1, HK=1, HV=2, K=128, V=128)
SAME = USUAL.of(name="identical", keys="identical", rate=0.0, beta="one")
"""What queries ask of the states adds up from chunk to chunk, and cancels in dv and dbeta."""
KINDS = [
    USUAL,
    USUAL.of(name="packed, raw", lengths=(5, 0, 64, 1, 130), raw=True),
    USUAL.of(name="two rows, raw", B=2, T=100, HQ=2, HK=2, HV=4, raw=True, neg_eigval=True),
    USUAL.of(name="one value head per key", T=70, HV=1),
    USUAL.of(name="four value heads per key", T=70, HV=4),
    USUAL.of(name="one query head", T=70, HK=2, HV=4),
    USUAL.of(name="kv, no norm", layout="kv", normalize=False, scale=0.3),
    USUAL.of(name="no decay, no state", decay=None, state=False),
    *[USUAL.of(name=f"{T} tokens", T=T) for T in (1, 63, 64, 65)],
]
FEW = [
    SAME.of(name="70 identical", T=70),
    SAME.of(name="70 identical, decay 1", T=70, rate=1.0),
    SAME.of(name="129 identical", T=129),
    SAME.of(name="65 identical, decay 1", T=65, HV=1, rate=1.0),
    USUAL.of(name="10 tokens, decay 20", T=10, rate=20.0),
    USUAL.of(name="64 tokens, decay 20", T=64, rate=20.0),
]
"""What bfloat16 states and errors are not enough for: in these draws nearly all of dg or of dbeta
cancels. The third and the fourth end with a chunk of one token, the last two have but one chunk.
Of bfloat16 alone: float16 has no second terms (docs/kernels/backward.md)."""
HARD = [
    SAME,
    USUAL.of(name="repeated", T=500, HV=1, keys="repeated", rate=0.0, beta="one"),
    USUAL.of(name="correlated", T=500, HV=1, keys="correlated", rate=0.001),
    USUAL.of(name="decay 20", rate=20.0),
    USUAL.of(name="beta 0", beta="zero"),
    USUAL.of(name="beta near 0", beta="small"),
]
SPLIT = [
    USUAL.of(name="split", T=500),
    USUAL.of(name="split, packed", lengths=(5, 0, 256, 1, 300), raw=True),
    USUAL.of(name="split, repeated", T=300, keys="repeated", rate=0.0, beta="one"),
    USUAL.of(name="split, identical", T=300, keys="identical", rate=0.0, beta="one"),
]
"""To be split into segments of 128 tokens."""
MIXED = SAME.of(name="hard and not", lengths=(65, 64, 0, 1, 130, 1, 100))
FEW = [
    MIXED.of(name="hard and not"),
    MIXED.of(name="hard and not, one head", HV=1),
    USUAL.of(name="many chunks", T=500, HQ=2, HK=2, HV=4),
    USUAL.of(name="packed, raw, odd", lengths=(5, 0, 64, 1, 130, 0, 0, 77, 64), raw=True, HV=1),
    USUAL.of(name="no decay, many", T=300, decay=None, normalize=False, HV=3),
]
"""To be gone through by two programs: one meets hard chunks after others, and empty ones. A
sequence of one token has no key that repeats."""
