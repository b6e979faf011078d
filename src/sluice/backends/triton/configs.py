"""Launch configurations as data: rows of (limit, configuration), the first row that fits is taken.

Each table says on which GPU and when its rows were measured; docs/kernels has the numbers. Nothing
is tuned at run time. Rows of one table differ only in what cannot change a bit of the result: how
many rows of a state or tokens a program holds, never how a sum is ordered (C and num_warps).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton


class Config(NamedTuple):
    """How a kernel is cut and launched; a kernel reads the sizes it has."""

    num_warps: int
    BLOCK_V: int = 0  # state rows a program holds
    C: int = 0  # keys in a piece of a state tile
    BLOCK_T: int = 0  # tokens a program holds at a time
    BLOCK_D: int = 0  # channels a program holds
    CHUNK: int = 0  # tokens a program owns
    LOAD: str = ""  # what of a state is read, for the cache: STREAM, KEEP, or as any line
    STORE: str = ""  # what of a state is written, likewise
    num_stages: int = 1
    maxnreg: int | None = None  # registers of a thread, where more would leave too few programs
    fp_fusion: bool = False  # whether the compiler may fuse products into sums


class Row(NamedTuple):
    """A configuration for up to ``limit`` units of work."""

    limit: float
    config: Config


ANY = float("inf")
STREAM, KEEP = "evict_first", "evict_last"

# decode, verify and commit; the unit is N·HV states. H200, 2026-11-15.
# A GPU starts some 800 programs a microsecond, so a program must move 8 KiB or more; fewer rows a
# program are quicker while there are few states. 128 keys a piece are read 512 bytes at a time,
# which bf16 states gain from; 32 keys a piece need fewer shuffles, which float32 states gain from.
# With float32 states read as KEEP a large batch takes 3% less, also where far more states go round
# than the cache holds; 256 states take 1% more.
DECODE: dict[tuple[str, int], tuple[Row, ...]] = {
    # (state layout, bytes of an element)
    ("vk", 4): (
        Row(32, Config(num_warps=2, BLOCK_V=8, C=32, LOAD=KEEP, STORE=STREAM)),
        Row(512, Config(num_warps=2, BLOCK_V=8, C=32, LOAD=STREAM, STORE=STREAM)),
        Row(2048, Config(num_warps=2, BLOCK_V=8, C=32, LOAD=KEEP, STORE=STREAM)),
        Row(ANY, Config(num_warps=2, BLOCK_V=8, C=32, LOAD=KEEP)),
    ),
    ("vk", 2): (
        Row(64, Config(num_warps=1, BLOCK_V=8, C=128, LOAD=STREAM, STORE=STREAM)),
        Row(ANY, Config(num_warps=1, BLOCK_V=16, C=128)),
    ),
    # How many lanes lie along K, and so the order of a sum, follows from BLOCK_V here. 32 columns
    # are whole lines of float32, and half ones of bf16.
    ("kv", 4): (Row(ANY, Config(num_warps=2, BLOCK_V=32, C=32, LOAD=KEEP)),),
    ("kv", 2): (
        Row(512, Config(num_warps=2, BLOCK_V=32, C=32, LOAD=STREAM, STORE=STREAM)),
        Row(ANY, Config(num_warps=2, BLOCK_V=32, C=32, LOAD=KEEP)),
    ),
}
# The same with more than one token: in the last rows what a token costs a program is shared by
# more rows of a state.
DRAFT: dict[tuple[str, int], tuple[Row, ...]] = {
    ("vk", 4): (
        Row(256, Config(num_warps=2, BLOCK_V=8, C=32, LOAD=STREAM, STORE=STREAM)),
        Row(ANY, Config(num_warps=2, BLOCK_V=64, C=32)),
    ),
    ("vk", 2): (
        Row(256, Config(num_warps=1, BLOCK_V=8, C=128, LOAD=STREAM, STORE=STREAM)),
        Row(ANY, Config(num_warps=1, BLOCK_V=32, C=128)),
    ),
}
# commit, from COMMIT_FROM states on. It makes no sums, so any C leaves the same bits.
COMMIT_FROM = 2048
COMMIT: dict[tuple[str, int], Config] = {("vk", 4): Config(num_warps=1, BLOCK_V=16, C=128)}
# commit: channels of a conv window that one program moves
WINDOW_CHANNELS = 256


def decode(
    state_dtype: torch.dtype, state_layout: str, K: int, V: int, states: int, tokens: int = 1
) -> Config:
    """The row for ``states`` = N·HV states."""
    key = state_layout, state_dtype.itemsize
    table = DRAFT if tokens > 1 and key in DRAFT else DECODE
    return _fitted(_pick(table[key], states), K, V)


def commit(state_dtype: torch.dtype, state_layout: str, K: int, V: int, states: int) -> Config:
    """decode's row, or commit's own for many states."""
    key = state_layout, state_dtype.itemsize
    if key in COMMIT and states >= COMMIT_FROM:
        return _fitted(COMMIT[key], K, V)
    return decode(state_dtype, state_layout, K, V, states)


def _fitted(config: Config, K: int, V: int) -> Config:
    """No larger than a state; keys beyond 128 halve the rows a program holds."""
    rows = min(config.BLOCK_V, power_of_two(V))
    if K > 128:
        rows = max(1, rows // 2)
    return config._replace(BLOCK_V=rows, C=min(config.C, power_of_two(K)))


# causal_conv1d; the unit is the tokens of a sequence. H200, 2026-11-15.
CONV: tuple[Row, ...] = (
    Row(1, Config(num_warps=1, BLOCK_T=1, BLOCK_D=128, CHUNK=1)),
    Row(4, Config(num_warps=1, BLOCK_T=4, BLOCK_D=128, CHUNK=4)),
    Row(ANY, Config(num_warps=2, BLOCK_T=8, BLOCK_D=128, CHUNK=64, num_stages=3)),
)


def conv(D: int, tokens: int) -> Config:
    """The row for sequences of ``tokens`` tokens."""
    config = _pick(CONV, tokens)
    return config._replace(BLOCK_D=min(config.BLOCK_D, power_of_two(D)))


# conv_qkv; the unit is the tokens of a sequence. H200, 2026-11-15.
# One warp in every row: the order of the norm's sum is its lanes'. With 64 registers an SM holds 32
# programs of one warp, which is as many as it takes; what Triton 3.8 makes would spill 104 bytes.
_FEW = 64 if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 8) else None
_ONE = Config(num_warps=1, BLOCK_T=1, CHUNK=1, maxnreg=_FEW, fp_fusion=True)
CONV_QKV: tuple[Row, ...] = (
    Row(1, _ONE),
    Row(4, _ONE._replace(BLOCK_T=4, CHUNK=4)),
    Row(ANY, _ONE._replace(BLOCK_T=4, CHUNK=16)),
)


def conv_qkv(K: int, V: int, tokens: int, itemsize: int = 2) -> Config:
    """The row for sequences of ``tokens`` tokens; channels are a head's.

    Heads wider than 256 bytes have as many registers as they like.
    """
    channels = power_of_two(max(K, V))
    config = _pick(CONV_QKV, tokens)
    registers = config.maxnreg if channels * itemsize <= 256 else None
    return config._replace(BLOCK_D=channels, maxnreg=registers)


# step: a program holds a whole state. H200, 2026-11-15. "kv": all keys are one piece, so that most
# of a sum over them is within a thread.
STEP: dict[tuple[str, int], Config] = {
    # (state layout, bytes of an element)
    ("vk", 4): Config(num_warps=4, C=32, fp_fusion=True),
    ("vk", 2): Config(num_warps=4, C=64, fp_fusion=True),
    ("kv", 4): Config(num_warps=4, C=256, fp_fusion=True),
    ("kv", 2): Config(num_warps=4, C=256, fp_fusion=True),
}


def step(state_dtype: torch.dtype, state_layout: str, K: int, V: int) -> Config:
    """More warps, and all registers, for states larger than 128 × 128."""
    config = STEP[state_layout, state_dtype.itemsize]
    config = config._replace(C=min(config.C, power_of_two(K)))
    larger = power_of_two(K) * power_of_two(V) // 128**2
    if larger <= 1:
        return config
    warps = min(16, config.num_warps * larger)
    return config._replace(num_warps=warps, maxnreg=65536 // (32 * warps) // 8 * 8)


# rms_norm_gated: rows of a program for a width of 128.
NORM = Config(num_warps=4, BLOCK_T=16)


def norm(V: int) -> Config:
    """About 2,048 elements a program, whatever the width."""
    return NORM._replace(BLOCK_T=max(1, 128 * NORM.BLOCK_T // power_of_two(V)))


def _pick(rows: tuple[Row, ...], work: int) -> Config:
    return next(row.config for row in rows if work <= row.limit)


def power_of_two(n: int) -> int:
    """The least one that is not below n. (Triton's own functions of this kind take 5 µs a call.)"""
    return 1 << (n - 1).bit_length()


def blocks(n: int, size: int) -> int:
    """How many blocks of ``size`` cover n."""
    return -(-n // size)
