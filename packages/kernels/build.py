"""Compile sluice's GPU kernels for the package sluice_kernels, without a GPU.

    python packages/kernels/build.py [--targets sm_90a,sm_80] [--models qwen3.5-27b] [--tp 1,2,4,8]

Every kernel that ``sluice warmup --checkpoints`` names is compiled, for bfloat16 and float16
inputs, float32 and bfloat16 states, int32 and int64 slots. Two builds give the same bytes. Triton
keeps what it compiled, so a build that was interrupted goes on where it stopped.
"""
# ruff: noqa: T201

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import json
import multiprocessing
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

os.environ["TRITON_DISABLE_LINE_INFO"] = "1"  # noqa: TID251 (no paths of this machine in the code)
os.environ["SLUICE_KERNELS"] = ""  # noqa: TID251 (what is installed is not looked at)

import torch
import triton
from triton.backends.compiler import GPUTarget

from sluice.backends import hopper
from sluice.backends import triton as portable
from sluice.backends.triton import compiler, gpu, shipped, variants
from sluice.layers.qwen import PRESETS, QwenShape, preset
from sluice.model_calls import Kinds
from sluice.progress import counted
from sluice.warmup import forms

TRITON = "3.6.0"
"""The one release that compiles them: its kernels were run and measured on an H200."""
FACTS = {
    "sm_80": gpu.Facts((8, 0), 108, 163 << 10),
    "sm_89": gpu.Facts((8, 9), 142, 99 << 10),
    "sm_90a": gpu.Facts((9, 0), 132, 227 << 10),
    "sm_100": gpu.Facts((10, 0), 148, 227 << 10),
    "sm_120": gpu.Facts((12, 0), 188, 99 << 10),
}
RUN = {"sm_90a": "run on an H200"}
"""Targets whose kernels ran on a GPU; the others were compiled, no more."""
DTYPES = (torch.bfloat16, torch.float16)
STATE_DTYPES = (torch.float32, torch.bfloat16)
SLOT_DTYPES = (torch.int32, torch.int64)
DEVICE = torch.device("cuda", 0)


def shapes(models: Iterable[str], ranks: Iterable[int]) -> list[QwenShape]:
    """The shapes of these models at these numbers of ranks, each once."""
    found: dict[Any, QwenShape] = {}
    for model, tp in itertools.product(models, ranks):
        s = preset(model, tp)
        found.setdefault((s.num_k_heads, s.num_v_heads, s.order, s.gate_activation), s)
    return list(found.values())


def needed(target: str, of: Iterable[QwenShape]) -> list[variants.Variant]:
    """Every variant that these shapes need on a target, in an order that does not change."""
    found: dict[variants.Variant, None] = {}
    with gpu.assume(FACTS[target]):
        for shape, *kinds in itertools.product(of, DTYPES, STATE_DTYPES, SLOT_DTYPES):
            dtype, state_dtype, slots_dtype = kinds
            told = Kinds(dtype, dtype, state_dtype, "vk", slots_dtype)
            for form in forms(shape, 1, DEVICE, told, checkpoints=True):
                spec = form.spec(DEVICE)
                for call in kernel_calls(spec):
                    found.setdefault(variants.variant(call))
    return list(found)


def kernel_calls(spec: Any) -> Iterator[Any]:
    """Every launch that a call, and such of other sizes, may make on the GPU assumed."""
    for package in (hopper, portable):
        if spec.op in package.OPS and package.refuse(spec) is None:
            for call, _ in portable.kernel_calls(package.__name__, package.OPS, [spec]):
                if call.programs > 0:
                    yield call
            return


def compiled(job: tuple[variants.Variant, str]) -> shipped.MachineCode:
    """The machine code of a variant for a target; in a process of its own."""
    variant, target = job
    major, minor = FACTS[target].capability
    made = compiler.cross_compile(variant, GPUTarget("cuda", 10 * major + minor, 32))
    return compiler.machine_code(made)


def build(out: Path, targets: Iterable[str], of: list[QwenShape], jobs: int) -> dict[str, Any]:
    """Compile everything into ``out``: the manifest."""
    manifest: dict[str, Any] = {
        "format": shipped.FORMAT,
        "sources": shipped.source_hash(),
        "triton": triton.__version__,
        "parameters": {},
        "targets": {},
    }
    for target in targets:
        wanted = needed(target, of)
        folder = out / target
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        entries: dict[str, Any] = {}
        with contextlib.ExitStack() as scope:
            show, todo = scope.enter_context(counted()), [(v, target) for v in wanted]
            made: Iterable[shipped.MachineCode] = map(compiled, todo)
            if jobs > 1:
                pool = scope.enter_context(multiprocessing.get_context("spawn").Pool(jobs))
                made = pool.imap(compiled, todo, chunksize=4)
            for done, (variant, code) in enumerate(zip(wanted, made, strict=True)):
                if done % 8 == 0:
                    show(f"{target}: {variant.kernel.name}", done, len(wanted))
                digest = hashlib.sha256(code.cubin).hexdigest()
                (folder / f"{digest[:32]}.cubin").write_bytes(code.cubin)
                entry = {**code._asdict(), "sha256": digest, "bytes": len(code.cubin)}
                del entry["cubin"]
                entries[variant.key] = entry
                told = [list(p) for p in variants.parameters(variant.kernel)]
                manifest["parameters"][variant.kernel.name] = told
        status = RUN.get(target, "compiled, not run")
        manifest["targets"][target] = {"status": status, "kernels": entries}
    text = json.dumps(manifest, indent=1, sort_keys=True)
    (out / shipped.MANIFEST).write_text(text + "\n", "utf-8")
    return manifest


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets", default=",".join(FACTS), help="%(default)s by default")
    parser.add_argument("--models", default=",".join(PRESETS), help="all by default")
    parser.add_argument("--tp", default="1,2,4,8", help="numbers of ranks, %(default)s by default")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "sluice_kernels")
    given = parser.parse_args(argv)
    if triton.__version__ != TRITON:
        sys.exit(f"the kernels are compiled by Triton {TRITON}, found {triton.__version__}")
    if unknown := set(given.targets.split(",")) - set(FACTS):
        sys.exit(f"--targets: expected some of {', '.join(FACTS)}, got {', '.join(unknown)}")
    of = shapes(given.models.split(","), map(int, given.tp.split(",")))
    manifest = build(given.out, given.targets.split(","), of, given.jobs)
    for target, told in manifest["targets"].items():
        files = {entry["sha256"]: entry["bytes"] for entry in told["kernels"].values()}
        size = sum(files.values()) / 1e6
        print(f"{target}: {len(told['kernels'])} kernels, {len(files)} files, {size:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
