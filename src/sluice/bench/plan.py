"""The workloads of a run: surfaces as data, narrowed by the options of the command.

A surface is rows of (operator, models with their tensor-parallel size, sizes, dtype of the state,
and whether prefill computes its gates and unit keys itself). The most important rows come first,
so that a run cut short has them.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from sluice.contract.errors import SluiceError
from sluice.layers.qwen import named
from sluice.testing.workload import (
    BATCH_OPS,
    OPS,
    PROMPT_OPS,
    Size,
    Workload,
    describe,
    parse_size,
)

OP_ALIASES = {
    "conv": "causal_conv1d",
    "conv1d": "causal_conv1d",
    "qkv": "conv_qkv",
    "norm": "rms_norm_gated",
    "rms_norm": "rms_norm_gated",
}
FP32, BF16 = torch.float32, torch.bfloat16
STATE_DTYPES = {"float32": FP32, "bfloat16": BF16, "float16": torch.float16}

Model = tuple[str, int]


class Entry(NamedTuple):
    """One operator of some models, at some sizes."""

    op: str
    models: tuple[Model, ...]
    sizes: tuple[str, ...]
    state_dtype: torch.dtype = FP32
    raw: bool = False


A3B_TP2 = ("Qwen3.5-35B-A3B", 2)
A3B, BIG, BIG_TP8 = ("Qwen3.5-35B-A3B", 1), ("Qwen3.5-397B-A17B", 1), ("Qwen3.5-397B-A17B", 8)
BIG_TP4 = ("Qwen3.5-397B-A17B", 4)
SMALL, MIDDLE, DENSE = ("Qwen3.5-0.8B", 1), ("Qwen3.5-4B", 1), ("Qwen3.5-27B", 1)

PROMPTS = ("8192", "8x1024", "32768", "8x4096", "2048")

SURFACES: dict[str, tuple[Entry, ...]] = {
    "cpu-quick": (
        Entry("decode", (MIDDLE,), ("N=1", "N=8")),
        Entry("prefill", (MIDDLE,), ("512",)),
        Entry("step", (MIDDLE,), ("N=1",)),
        Entry("layer", (MIDDLE,), ("256",)),
        Entry("conv_qkv", (MIDDLE,), ("512",)),
        Entry("rms_norm_gated", (MIDDLE,), ("512",)),
        Entry("verify", (MIDDLE,), ("N=4",)),
        Entry("causal_conv1d", (MIDDLE,), ("512", "N=8")),
        Entry("step", (MIDDLE,), ("N=8",)),
        Entry("conv_qkv", (MIDDLE,), ("N=8",)),
        Entry("prefill", (MIDDLE,), ("300+129+64+17+2x1",)),
    ),
    "cpu": (
        Entry("decode", (MIDDLE,), ("N=1", "N=2", "N=4", "N=8", "N=16", "N=32")),
        Entry("prefill", (MIDDLE,), ("128", "512", "2048", "8x256", "300+129+64+17+2x1")),
        Entry("prefill", (MIDDLE,), ("512+2x128+8x1",)),
        Entry("decode", (SMALL, DENSE), ("N=1", "N=8")),
        Entry("prefill", (SMALL, DENSE, BIG_TP8), ("128", "512", "2048")),
        Entry("verify", (MIDDLE,), ("N=1", "N=8")),
        Entry("step", (MIDDLE,), ("N=1", "N=4", "N=16")),
        Entry("layer", (MIDDLE,), ("512", "4x128")),
        Entry("causal_conv1d", (MIDDLE,), ("512", "2048", "N=1", "N=16")),
        Entry("conv_qkv", (MIDDLE,), ("512", "2048", "N=1", "N=16")),
        Entry("rms_norm_gated", (MIDDLE,), ("16", "2048")),
        Entry("decode", (MIDDLE,), ("N=1", "N=8"), BF16),
        Entry("train", (MIDDLE,), ("512",)),
    ),
    "cuda-quick": (
        Entry("decode", (A3B,), ("N=1", "N=64")),
        Entry("prefill", (A3B,), ("2048", "8192", "8x1024")),
        Entry("step", (A3B,), ("N=1", "N=64")),
        Entry("conv_qkv", (A3B,), ("8192",)),
        Entry("rms_norm_gated", (A3B,), ("8192",)),
    ),
    "cuda": (
        Entry("prefill", (A3B,), PROMPTS),
        Entry("prefill", (BIG_TP8,), PROMPTS),
        Entry("prefill", (BIG,), PROMPTS),
        Entry("decode", (A3B,), ("N=1", "N=8", "N=32", "N=64", "N=128", "N=256")),
        Entry("verify", (A3B,), ("N=1", "N=16", "N=64", "N=256")),
        Entry("step", (A3B,), ("N=1", "N=4", "N=16", "N=64", "N=256")),
        Entry("conv_qkv", (A3B,), ("8192", "512", "2048", "4096", "16384")),
        Entry("conv_qkv", (DENSE,), ("8192",)),
        Entry("layer", (A3B,), ("2048", "8192")),
        Entry("prefill", (A3B,), ("8192", "8x1024"), raw=True),
        Entry("decode", (A3B,), ("N=1", "N=8", "N=32", "N=64", "N=128", "N=256"), BF16),
        Entry("decode", (BIG_TP8, BIG_TP4, DENSE, BIG), ("N=1", "N=64", "N=256")),
        Entry("rms_norm_gated", (A3B,), ("64", "8192")),
        Entry("prefill", (A3B,), ("ragged", "continue")),
        Entry("verify", (A3B,), ("N=1", "N=64"), BF16),
        Entry("step", (A3B,), ("N=1", "N=64"), BF16),
        Entry("step", (BIG_TP8,), ("N=1", "N=64")),
        Entry("causal_conv1d", (A3B,), ("8192", "8x1024", "N=64")),
        Entry("conv_qkv", (A3B,), ("ragged", "N=64")),
        Entry("decode", (A3B,), ("N=512",)),
        Entry("train", (A3B,), ("8192", "32768", "4x2048")),
        Entry("train", (A3B_TP2,), ("8192", "32768")),
    ),
}


@dataclass(frozen=True)
class Wanted:
    """The options of the command line; an empty one means the surface's own."""

    ops: tuple[str, ...] = ()
    presets: tuple[str, ...] = ()
    tps: tuple[int, ...] = ()
    lengths: tuple[Size, ...] = ()
    batches: tuple[Size, ...] = ()
    state_dtypes: tuple[torch.dtype, ...] = ()


def workloads(surface: str, wanted: Wanted, dtype: torch.dtype) -> list[Workload]:
    """The workloads of a run, each once, in order."""
    ops = wanted.ops or OPS
    for option, given, takers in (
        ("--lengths", wanted.lengths, PROMPT_OPS),
        ("--batch", wanted.batches, BATCH_OPS),
    ):
        if given and not set(ops) & set(takers):
            taken = f"{option} is for {', '.join(takers)}"
            raise SluiceError(f"bench: {taken}, and {', '.join(ops)} was asked for")
    chosen: dict[str, Workload] = {}
    for entry in SURFACES[surface]:
        if (wanted.ops and entry.op not in wanted.ops) or (entry.raw and _own(wanted)):
            continue
        for model, tp in _models(entry, wanted):
            shape = named("bench", "--model", model).shard(tp)
            for size in _sizes(entry, wanted):
                for state_dtype in _state_dtypes(entry, wanted):
                    workload = describe(entry.op, shape, size, dtype, state_dtype, entry.raw)
                    chosen.setdefault(workload.name, workload)
    if not chosen:
        raise SluiceError(f"bench: none of {', '.join(wanted.ops)} takes the sizes asked for")
    return list(chosen.values())


def _state_dtypes(entry: Entry, wanted: Wanted) -> tuple[torch.dtype, ...]:
    """The requested dtypes; float32 for requested sizes or models; else the surface's own."""
    return wanted.state_dtypes or ((FP32,) if _own(wanted) else (entry.state_dtype,))


def _own(wanted: Wanted) -> bool:
    """Whether sizes or models were requested, which replace the surface's."""
    return bool(wanted.lengths or wanted.batches or wanted.presets or wanted.tps)


def _models(entry: Entry, wanted: Wanted) -> Iterable[Model]:
    if not wanted.presets and not wanted.tps:
        return entry.models
    names = wanted.presets or tuple(dict.fromkeys(name for name, _ in entry.models))
    return [(name, tp) for name in names for tp in wanted.tps or (1,)]


def _sizes(entry: Entry, wanted: Wanted) -> list[Size]:
    """The requested sizes that this operator takes, or the surface's own."""
    asked = [size for size in wanted.lengths if entry.op in PROMPT_OPS]
    asked += [size for size in wanted.batches if entry.op in BATCH_OPS]
    if entry.op == "layer":
        asked = [size for size in asked if len(set(size.lengths or ())) == 1]
    if asked or ((wanted.lengths or wanted.batches) and not wanted.ops):
        return asked
    return [parse_size(text) for text in entry.sizes]


def op_names(names: Sequence[str]) -> tuple[str, ...]:
    """Operators by name or short name; the error for a wrong one suggests the nearest."""
    return tuple(nearest("operator", name, (*OPS, *OP_ALIASES), OP_ALIASES) for name in names)


def sizes(text: str, option: str) -> tuple[Size, ...]:
    """A list such as "8192,4x2048,ragged" or, for batches, "1,8,64"."""
    found = []
    for part in map(str.strip, text.split(",")):
        if option == "--batch" and not part.isdigit():
            raise SluiceError(f"--batch: expected a number of sequences, got {part!r}")
        try:
            found.append(parse_size(f"N={part}" if option == "--batch" else part))
        except ValueError as error:
            raise SluiceError(f"{option}: expected {error}") from None
    return tuple(found)


def nearest(
    what: str, name: str, known: Sequence[str], aliases: dict[str, str] | None = None
) -> str:
    """The known spelling of ``name``, or an error that suggests the nearest one."""
    aliases = aliases or {}
    key = name.strip().lower()
    if key in known:
        return aliases.get(key, key)
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.65)
    listed = ", ".join(x for x in known if x not in aliases)
    hint = f"did you mean {aliases.get(close[0], close[0])!r}?" if close else f"one of {listed}"
    raise SluiceError(f"bench: {name!r} is no {what} ({hint})")
