"""The calls with which Triton's backward of prefill is tested: run on a GPU, compiled without."""

from __future__ import annotations

from tests.training.calls import Call

SMALL = Call("base", B=1, HQ=1, HK=1, HV=2, K=16, V=24)
KINDS = [
    SMALL,
    SMALL.of(name="linear", decay=None, delta=False),
    SMALL.of(name="gated", delta=False),
    SMALL.of(name="delta", decay=None),
    SMALL.of(name="raw", raw=True, neg_eigval=True, B=2),
    SMALL.of(name="packed", HV=4, lengths=(5, 0, 64, 1, 70), raw=True),
    SMALL.of(name="many queries", HQ=4),
    SMALL.of(name="one query", HK=2),
    SMALL.of(name="no state, no norm", state=False, normalize=False, scale=0.3),
    SMALL.of(name="kv", layout="kv", V=16, HK=2, HQ=2),
]
HARD = [
    SMALL.of(name=f"{keys}, decay {rate}, beta {beta}", keys=keys, rate=rate, beta=beta, T=130)
    for keys, rate, beta in (
        ("random", 20.0, "random"),
        ("correlated", 0.001, "one"),
        ("repeated", 0.0, "one"),
        ("identical", 0.0, "one"),
        ("random", 0.1, "zero"),
    )
] + [SMALL.of(name="beta near 0, long keys", beta="small", K=128, V=32, HV=1)]
"""Long keys: what two tokens give each other's gradients is over both lengths, and small."""
KEY = SMALL.of(name="per key", decay="key", T=17)
KEYS = [
    KEY,
    KEY.of(name="per key, raw, packed", lengths=(5, 0, 16, 1, 33), raw=True),
    KEY.of(name="per key, gated", delta=False),
    KEY.of(name="per key, raw, two rows", raw=True, neg_eigval=True, B=2, HV=1),
    KEY.of(name="per key, many queries", HQ=4),
    KEY.of(name="per key, one query", HK=2),
    KEY.of(name="per key, no state, no norm", state=False, normalize=False, scale=0.3),
    KEY.of(name="per key, kv", layout="kv", V=16, HK=2, HQ=2),
    KEY.of(name="per key, wide", K=200, V=136, HV=1),
    *[KEY.of(name=f"per key, {T} tokens", T=T, HV=1) for T in (1, 15, 16, 65)],
]
"""Chunks have 16 tokens."""
LONGER_KEY = KEY.of(T=50, HV=1)
HARD_KEYS = [
    LONGER_KEY.of(
        name=f"per key, {keys}, decay {rate}, beta {beta}", keys=keys, rate=rate, beta=beta
    )
    for keys, rate, beta in (
        ("random", 20.0, "random"),
        ("correlated", 0.001, "one"),
        ("repeated", 0.0, "one"),
        ("identical", 0.0, "one"),
        ("identical", 1.0, "random"),
        ("random", 0.1, "zero"),
    )
]
WIDE = [
    Call("128", B=1, T=200, K=128, V=128, state=False),
    Call("64", B=1, T=200, K=64, V=64, raw=True, state=False),
    Call("128, packed", lengths=(5, 0, 64, 1, 130), K=128, V=128),
    Call("128, repeated", B=1, T=130, K=128, V=128, keys="repeated", rate=0.0, beta="one"),
    Call("128, correlated", B=1, T=200, K=128, V=128, keys="correlated", rate=0.01),
    Call(
        "128, identical",
        B=1,
        T=200,
        HV=2,
        HQ=1,
        HK=1,
        K=128,
        V=128,
        keys="identical",
        rate=0.0,
        beta="one",
    ),
    Call("256", B=1, T=70, HV=2, K=256, V=256),
]
WIDE_KEYS = [
    Call("per key, 128", B=1, T=200, K=128, V=128, decay="key"),
    Call("per key, 64, raw, packed", lengths=(5, 0, 64, 1, 130), K=64, V=64, decay="key", raw=True),
    Call("per key, 128, decay 20", B=1, T=130, K=128, V=128, decay="key", rate=20.0),
    Call("per key, 128, identical", T=130, K=128, V=128, decay="key", keys="identical", rate=0.0),
    Call("per key, 256", B=1, T=70, HV=2, K=256, V=256, decay="key"),
]
SPLIT = [
    SMALL.of(name="split", T=200, B=2),
    SMALL.of(name="split, packed", lengths=(5, 0, 130, 64, 65), raw=True),
    SMALL.of(name="split, kv", T=192, layout="kv", V=16, HK=2, HQ=4),
    SMALL.of(name="split, gated", T=130, delta=False, state=False),
    SMALL.of(name="split, repeated", T=130, keys="repeated", rate=0.0, beta="one"),
]
"""To be split into segments of 64 tokens."""
WIDE_SPLIT = [
    Call("split, 128", B=1, T=500, K=128, V=128, state=False),
    Call("split, 128, packed", lengths=(5, 0, 256, 1, 300), K=128, V=128),
    Call("split, 128, repeated", T=300, K=128, V=128, keys="repeated", rate=0.0, beta="one"),
    Call("split, 128, correlated", T=300, K=128, V=128, keys="correlated", rate=0.01),
    Call(
        "split, one beta",
        B=1,
        T=500,
        HQ=1,
        HK=1,
        K=128,
        V=128,
        keys="identical",
        rate=0.0,
        beta=0.9,
        state=False,
    ),
    Call("split, 64", B=1, T=500, K=64, V=64, raw=True),
]
"""Into segments of 128."""
