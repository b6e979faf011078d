"""The CPU kernels against the memory they move: 16-bit states, copies, packed sequences.

    PYTHONPATH=src python benchmarks/cpu_memory.py [LINE ...]

Lines: states, convolution, norm, packed, one; by default all of them. The rules are those of
``cpu_targets.py``: sides take turns in bursts with a pause before each, and are checked first.

- states: ``decode`` whose states and tokens are float32, bfloat16 or float16. "floor" reads and
  writes the bytes of the float32 state, "floor16" those of a 16-bit one.
- convolution, norm: the share of a copy's speed. "copy" is torch's copy of as many bytes as the
  operator reads and writes.
- packed: 16 sequences of 128 tokens beside one of 2,048.
- one: the convolution of one token per sequence beside ONNX Runtime's.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from cpu_targets import (
    CHANNELS,
    HK,
    HV,
    TAPS,
    WIDTH,
    Run,
    check,
    exact,
    floor,
    launch_of,
    medians,
    on_cpu,
    onnx_conv,
    run_lines,
    show,
    states,
    tokens,
)

import sluice

BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
NAMES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


def copy(elements: int, dtype: torch.dtype) -> Run:
    """A copy that reads and writes ``elements`` in all."""
    source = torch.ones(elements // 2, dtype=dtype)
    return partial(torch.empty_like(source).copy_, source)


def states16() -> None:
    for N in (1, 8, 32):
        x, state = tokens(N, 1), states(N)
        want = exact("decode", x, state)
        sides: dict[str, Run] = {}
        for dtype, name in NAMES.items():
            narrow = (*(y.to(dtype) for y in x[:3]), *x[3:])
            own = state.to(dtype, copy=True)
            call = on_cpu("decode", *narrow, state=own, out=torch.empty_like(narrow[2]))
            for got, exactly in zip(call(), want, strict=True):
                check(got, exactly, BOUNDS[dtype])
            sides[name] = launch_of(call)
        sides["floor"] = floor(torch.ones(N, HV, WIDTH, WIDTH))
        sides["floor16"] = floor(torch.ones(N, HV, WIDTH, WIDTH // 2))
        bound = 1.0 if N == 1 else 1.6
        goals = {f"{n} over f32": ("f32", n, ">=", bound) for n in ("bf16", "f16")}
        show(f"decode, states N={N}", medians(sides, 9), goals)


def convolution() -> None:
    for T in (512, 2048):
        weight, bias = 0.3 * torch.randn(CHANNELS, TAPS), torch.randn(CHANNELS)
        window = torch.randn(1, CHANNELS, TAPS - 1)
        gates = {"a": torch.randn(1, T, HV), "b": torch.randn(1, T, HV), "A_log": torch.randn(HV)}
        heads = {"num_k_heads": HK, "num_v_heads": HV}
        wide = torch.randn(1, T, CHANNELS)
        for dtype in (torch.float32, torch.bfloat16):
            x = wide.to(dtype)
            given, exactly = (x, weight, bias), (x.double(), weight.double(), bias.double())
            both: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
                "conv_qkv": ({**gates, **heads}, {n: y.double() for n, y in gates.items()} | heads),
                "causal_conv1d": ({}, {}),
            }
            sides: dict[str, Run] = {}
            for op, (options, doubles) in both.items():
                call = on_cpu(op, *given, state=window.clone(), **options)
                out = call()
                want = getattr(sluice, op)(
                    *exactly, state=window.double(), **doubles, backend="reference"
                )
                check(out[0], want[0], BOUNDS[dtype])
                made = out if op == "conv_qkv" else out[0]
                sides[op] = launch_of(partial(call, out=made))
            sides["copy"] = copy(2 * x.numel(), dtype)
            goals = {f"{op}, share of a copy": ("copy", op, ">=", 0.6) for op in both}
            show(f"conv T={T} {NAMES[dtype]}", medians(sides, 7), goals)


def norm() -> None:
    for T in (512, 2048):
        for dtype in (torch.float32, torch.bfloat16):
            x, z = (torch.randn(1, T, HV, WIDTH).to(dtype) for _ in "xz")
            weight, out = torch.rand(WIDTH), torch.empty_like(x)
            call = on_cpu("rms_norm_gated", x, z, weight, out=out)
            want = sluice.rms_norm_gated(
                x.double(), z.double(), weight.double(), backend="reference"
            )
            check(call(), want, BOUNDS[dtype])
            sides = {"norm": launch_of(call), "copy": copy(3 * x.numel(), dtype)}
            goals = {"share of a copy": ("copy", "norm", ">=", 0.7)} if T == 2048 else {}
            show(f"rms_norm_gated T={T} {NAMES[dtype]}", medians(sides, 7), goals)


def packed() -> None:
    x, state = tokens(1, 2048), states(16)
    cu = torch.arange(17, dtype=torch.int32) * 128
    call = on_cpu("prefill", *x, state=state, cu_seqlens=cu, out=torch.empty_like(x[2]))
    one = on_cpu("prefill", *x, state=states(1), out=torch.empty_like(x[2]))
    wide = [y.double() for y in x]
    want = sluice.prefill(*wide, state=state.double(), cu_seqlens=cu, backend="reference")
    for got, exactly in zip(call(), want, strict=True):
        check(got, exactly, 1e-5)
    sides = {"packed": launch_of(call), "one": launch_of(one)}
    goals = {"16 x 128 over 1 x 2,048": ("packed", "one", "<=", 1.1)}
    show("prefill, packed", medians(sides, 9), goals)


def one() -> None:
    for N in (1, 8, 32):
        x, weight = torch.randn(N, 1, CHANNELS), 0.3 * torch.randn(CHANNELS, TAPS)
        bias, window = torch.randn(CHANNELS), torch.randn(N, CHANNELS, TAPS - 1)
        want = sluice.causal_conv1d(
            *(y.double() for y in (x, weight, bias)), state=window.double(), backend="reference"
        )
        call = on_cpu("causal_conv1d", x, weight, bias, state=window.clone())
        out = call()[0]
        check(out, want[0], 1e-5)
        into = partial(call, out=out)
        heads = {"num_k_heads": HK, "num_v_heads": HV}
        gates = {"a": torch.randn(N, 1, HV), "b": torch.randn(N, 1, HV), "A_log": torch.randn(HV)}
        fused = on_cpu("conv_qkv", x, weight, bias, state=window.clone(), **gates, **heads)
        made = fused()
        sides = {
            "causal_conv1d": launch_of(into),
            "conv_qkv": launch_of(partial(fused, out=made)),
            "call": into,
            "onnxruntime": onnx_conv(x.mT.contiguous(), weight, bias, window),
        }
        names = ("causal_conv1d", "conv_qkv")
        goals = {f"{n} over ONNX Runtime": ("onnxruntime", n, ">=", 2.0) for n in names}
        show(f"conv, one token N={N}", medians(sides, 9), goals)


def main() -> None:
    lines = {
        "states": states16,
        "convolution": convolution,
        "norm": norm,
        "packed": packed,
        "one": one,
    }
    run_lines(lines)


if __name__ == "__main__":
    main()
