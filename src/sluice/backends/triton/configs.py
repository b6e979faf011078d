"""Launch configurations as data: rows of (limit, configuration), and the first row that fits wins.

Each table says on which GPU and when its rows were measured; docs/kernels/*_log.md have the
numbers. Nothing is tuned at run time. Rows of one table may differ in how many state rows or tokens
a program holds, which changes no bit of the result. They agree in PIECE_K and num_warps, which
decide the order of sums.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from sluice.backends.triton import toolchain


class Config(NamedTuple):
    """How a kernel is cut and launched. Each kernel uses the sizes it knows."""

    num_warps: int
    BLOCK_V: int = 0  # state rows per program
    PIECE_K: int = 0  # keys per piece of a state tile
    BLOCK_T: int = 0  # tokens that a program holds at a time
    BLOCK_D: int = 0  # channels per program
    UNIT_T: int = 0  # tokens per work unit of a convolution
    LOAD: str = ""  # eviction policy of state loads: STREAM, KEEP or the default
    STORE: str = ""  # eviction policy of state stores
    num_stages: int = 1
    maxnreg: int | None = None  # most registers per thread, so that more programs fit on an SM
    fp_fusion: bool = False  # whether the compiler may fuse a product and a sum


class Row(NamedTuple):
    """A configuration for up to ``limit`` units of work."""

    limit: float
    config: Config


ANY = float("inf")
STREAM, KEEP = "evict_first", "evict_last"

# decode, verify and commit; the unit is N·HV states. H200, 2026-11-15.
# A GPU starts some 800 programs per microsecond, so a program must move 8 KiB or more; with few
# states, fewer rows per program are faster. 128 keys per piece make loads of 512 bytes, which helps
# bf16 states; 32 keys per piece need fewer shuffles, which helps float32 states. With KEEP, large
# batches of float32 states take 3% less time, even if far more states take turns than the cache
# holds, and 256 states take 1% more.
DECODE: dict[tuple[str, int], tuple[Row, ...]] = {
    # (state layout, bytes of an element)
    ("vk", 4): (
        Row(32, Config(num_warps=2, BLOCK_V=8, PIECE_K=32, LOAD=KEEP, STORE=STREAM)),
        Row(512, Config(num_warps=2, BLOCK_V=8, PIECE_K=32, LOAD=STREAM, STORE=STREAM)),
        Row(2048, Config(num_warps=2, BLOCK_V=8, PIECE_K=32, LOAD=KEEP, STORE=STREAM)),
        Row(ANY, Config(num_warps=2, BLOCK_V=8, PIECE_K=32, LOAD=KEEP)),
    ),
    ("vk", 2): (
        Row(64, Config(num_warps=1, BLOCK_V=8, PIECE_K=128, LOAD=STREAM, STORE=STREAM)),
        Row(ANY, Config(num_warps=1, BLOCK_V=16, PIECE_K=128)),
    ),
    # Here BLOCK_V decides how many lanes lie along K, and so the order of a sum: all rows agree in
    # it. 32 columns are a whole cache line of float32, and half a line of bf16.
    ("kv", 4): (Row(ANY, Config(num_warps=2, BLOCK_V=32, PIECE_K=32, LOAD=KEEP)),),
    ("kv", 2): (
        Row(512, Config(num_warps=2, BLOCK_V=32, PIECE_K=32, LOAD=STREAM, STORE=STREAM)),
        Row(ANY, Config(num_warps=2, BLOCK_V=32, PIECE_K=32, LOAD=KEEP)),
    ),
}
# The same with more than one token. With many states, more state rows share what a token costs a
# program.
DRAFT: dict[tuple[str, int], tuple[Row, ...]] = {
    ("vk", 4): (
        Row(256, Config(num_warps=2, BLOCK_V=8, PIECE_K=32, LOAD=STREAM, STORE=STREAM)),
        Row(ANY, Config(num_warps=2, BLOCK_V=64, PIECE_K=32)),
    ),
    ("vk", 2): (
        Row(256, Config(num_warps=1, BLOCK_V=8, PIECE_K=128, LOAD=STREAM, STORE=STREAM)),
        Row(ANY, Config(num_warps=1, BLOCK_V=32, PIECE_K=128)),
    ),
}
# commit, from COMMIT_FROM states on. It makes no sums, so any PIECE_K leaves the same bits.
COMMIT_FROM = 2048
COMMIT: dict[tuple[str, int], Config] = {("vk", 4): Config(num_warps=1, BLOCK_V=16, PIECE_K=128)}
# commit: channels of a conv window per program
WINDOW_CHANNELS = 256


def decode(
    state_dtype: torch.dtype, state_layout: str, K: int, V: int, states: int, tokens: int = 1
) -> Config:
    """The row for ``states`` = N·HV states."""
    key = state_layout, state_dtype.itemsize
    table = DRAFT if tokens > 1 and key in DRAFT else DECODE
    return _fitted(_pick(table[key], states), K, V)


def commit(state_dtype: torch.dtype, state_layout: str, K: int, V: int, states: int) -> Config:
    """decode's row; for many states commit's own."""
    key = state_layout, state_dtype.itemsize
    if key in COMMIT and states >= COMMIT_FROM:
        return _fitted(COMMIT[key], K, V)
    return decode(state_dtype, state_layout, K, V, states)


def _fitted(config: Config, K: int, V: int) -> Config:
    """The same, no larger than a state; with K > 128 half as many rows per program."""
    rows = min(config.BLOCK_V, power_of_two(V))
    if K > 128:
        rows = max(1, rows // 2)
    return config._replace(BLOCK_V=rows, PIECE_K=min(config.PIECE_K, power_of_two(K)))


# causal_conv1d; the unit is the tokens of a sequence. H200, 2026-11-15.
CONV: tuple[Row, ...] = (
    Row(1, Config(num_warps=1, BLOCK_T=1, BLOCK_D=128, UNIT_T=1)),
    Row(4, Config(num_warps=1, BLOCK_T=4, BLOCK_D=128, UNIT_T=4)),
    Row(ANY, Config(num_warps=2, BLOCK_T=8, BLOCK_D=128, UNIT_T=64, num_stages=3)),
)


CONV_CHECKPOINTS = Config(num_warps=1, BLOCK_D=256)
"""Of the kernel that writes conv windows at checkpoints; not measured."""


def conv(D: int, tokens: int) -> Config:
    """The row for sequences of ``tokens`` tokens."""
    config = _pick(CONV, tokens)
    return config._replace(BLOCK_D=min(config.BLOCK_D, power_of_two(D)))


# conv_qkv; the unit is the tokens of a sequence. H200, 2026-11-15.
# One warp in every row: the number of lanes decides the order of the norm's sum. With 64 registers
# per thread an SM holds 32 programs of one warp, the most it can.
FEW_REGISTERS, FEW_BEFORE = 64, (3, 8)
"""The limit, and the release of Triton whose code would spill 104 bytes with so few."""
_ONE = Config(num_warps=1, BLOCK_T=1, UNIT_T=1, fp_fusion=True)
CONV_QKV: tuple[Row, ...] = (
    Row(1, _ONE),
    Row(4, _ONE._replace(BLOCK_T=4, UNIT_T=4)),
    Row(ANY, _ONE._replace(BLOCK_T=4, UNIT_T=16)),
)


def conv_qkv(K: int, V: int, tokens: int, itemsize: int = 2) -> Config:
    """The row for sequences of ``tokens`` tokens. A program holds the channels of one head.

    Heads wider than 256 bytes have no limit of registers.
    """
    channels = power_of_two(max(K, V))
    config = _pick(CONV_QKV, tokens)
    few = channels * itemsize <= 256 and (toolchain.made_by() or FEW_BEFORE) < FEW_BEFORE
    return config._replace(BLOCK_D=channels, maxnreg=FEW_REGISTERS if few else None)


# step: a program holds a whole state. H200, 2026-11-15. "kv": all keys are one piece, so most of a
# sum over keys stays within a thread.
STEP: dict[tuple[str, int], Config] = {
    # (state layout, bytes of an element)
    ("vk", 4): Config(num_warps=4, PIECE_K=32, fp_fusion=True),
    ("vk", 2): Config(num_warps=4, PIECE_K=64, fp_fusion=True),
    ("kv", 4): Config(num_warps=4, PIECE_K=256, fp_fusion=True),
    ("kv", 2): Config(num_warps=4, PIECE_K=256, fp_fusion=True),
}


def step(state_dtype: torch.dtype, state_layout: str, K: int, V: int) -> Config:
    """More warps and all registers for states larger than 128 × 128."""
    config = STEP[state_layout, state_dtype.itemsize]
    config = config._replace(PIECE_K=min(config.PIECE_K, power_of_two(K)))
    larger = power_of_two(K) * power_of_two(V) // 128**2
    if larger <= 1:
        return config
    warps = min(16, config.num_warps * larger)
    return config._replace(num_warps=warps, maxnreg=65536 // (32 * warps) // 8 * 8)


# rms_norm_gated: BLOCK_T rows per program at a width of 128.
NORM = Config(num_warps=4, BLOCK_T=16)


def norm(V: int) -> Config:
    """About 2,048 elements per program, whatever the width."""
    return NORM._replace(BLOCK_T=max(1, 128 * NORM.BLOCK_T // power_of_two(V)))


# prefill with decay per key: one kernel, which needs more registers than a thread has and ran on an
# H200; or two, which spill next to nothing and have not run on a GPU, only in an emulator
# (docs/kernels/prefill.md). These major numbers of a compute capability take the one kernel.
KEY_WHOLE: tuple[int, ...] = (9,)
KEY = Config(num_warps=4, BLOCK_V=32)
# The second way, by a model of registers, not measured. A warp owns 16 value columns, the fewest
# that a product has, so a state takes K / 2 registers per thread. The operands of one piece, in two
# terms each, take 2 · PIECE_K; addresses and the rest about 100. Two warps per program: of four
# warps and 64 columns, compilers for Hopper make products of another kind.
KEY_CHUNKS = Config(num_warps=1, PIECE_K=16)
KEY_STATES = Config(num_warps=2, BLOCK_V=32, PIECE_K=32)


def prefill_key(K: int, V: int) -> Config:
    """Of the one kernel: no more columns than there are, half of them for wide keys."""
    columns = KEY.BLOCK_V if K <= 128 else KEY.BLOCK_V // 2
    return KEY._replace(BLOCK_V=min(columns, max(16, power_of_two(V))))


def prefill_key_states(K: int, V: int) -> Config:
    """Of the kernel that carries states in pieces: no more columns and keys than there are."""
    columns = min(KEY_STATES.BLOCK_V, max(16, power_of_two(V)))
    pieces = min(KEY_STATES.PIECE_K, max(16, power_of_two(K)))
    return KEY_STATES._replace(num_warps=columns // 16, BLOCK_V=columns, PIECE_K=pieces)


def _pick(rows: tuple[Row, ...], work: int) -> Config:
    return next(row.config for row in rows if work <= row.limit)


def power_of_two(n: int) -> int:
    """The least power of two that is at least n. (Triton's own function takes 5 µs per call.)"""
    return 1 << (n - 1).bit_length()


def blocks(n: int, size: int) -> int:
    """How many blocks of ``size`` cover n."""
    return -(-n // size)
