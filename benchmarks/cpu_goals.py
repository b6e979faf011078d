"""The rows that the CPU kernels' second round was to reach: each with its goal, hit or missed.

    PYTHONPATH=src python benchmarks/cpu_goals.py [LINE ...]

Lines: states, cached, memory, norm, one, layer, draft, prompt, packed, cores, start, cold; by
default all of them. The rules are those of ``cpu_targets.py``: the sides of a line take turns in
bursts with a pause before each, and are checked before they are timed. ``cpu_busy.py`` has the rows
of a busy machine, ``sluice demo`` those of a whole model.

Unless a line says otherwise, inputs and states rotate: every call of a side takes the next of so
many sets that all together are three times the last-level cache. In a model the weights of other
layers come between two calls, and nothing is left in the cache.

- states: ``decode`` whose states and tokens are float32, bfloat16 or float16. "floor" reads and
  writes the bytes of a float32 state, "floor16" those of a 16-bit one.
- cached: the same for one sequence, whose state stays in a cache.
- memory, norm: the share of a copy's speed. "copy" is torch's copy of as many bytes as the operator
  reads and writes.
- one: the convolution of one token per sequence beside ONNX Runtime's; nothing rotates.
- layer, draft: ``step``, and ``verify`` of four tokens with ``commit``, over ``decode``.
- prompt: ``prefill`` beside ONNX Runtime and transformers; packed: 16 sequences of 128 tokens
  beside one of 2,048. Nothing rotates.
- cores: every operator with one and with two threads.
- start: a new process, from its ``import sluice`` to the end of its first call, with kernels on
  disk. cold: ``sluice.warmup`` of one model with nothing on disk.
"""
# ruff: noqa: T201

from __future__ import annotations

import math
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from cpu_memory import BOUNDS, NAMES, one, packed
from cpu_targets import (
    CHANNELS,
    HK,
    HV,
    START,
    TAPS,
    WIDTH,
    Run,
    check,
    exact,
    floor,
    launch_of,
    medians,
    on_cpu,
    onnx_attention,
    run_lines,
    show,
    states,
    stock,
    tokens,
)

import sluice

ROUNDS = 9
HALVES = ("bf16", "f16")


def last_level() -> int:
    """Bytes of the last-level cache; 32 MB where Linux does not say."""
    sizes = [32 << 20]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        sizes.append(int(text[:-1]) << {"K": 10, "M": 20}[text[-1]])
    return max(sizes)


def sets_of(size: float) -> int:
    """How many sets of so many bytes are three times the last-level cache."""
    return max(1, math.ceil(3 * last_level() / size))


def rotate(make: Callable[[], Run], size: float) -> Run:
    """Runs that each take the next of several sets of so many bytes."""
    turns = cycle([make() for _ in range(sets_of(size))])
    return lambda: next(turns)()


def launches(make: Callable[[], Run], size: float) -> Run:
    """The same for the bound launch of a public call."""
    return launch_of(*(make() for _ in range(sets_of(size))))


def state_bytes(N: int, dtype: torch.dtype = torch.float32) -> int:
    return N * HV * WIDTH * WIDTH * dtype.itemsize


# -- one token per sequence -----------------------------------------------------------------------


def decode_call(x: tuple[torch.Tensor, ...], state: torch.Tensor, **options: Any) -> Run:
    return on_cpu("decode", *x, state=state, out=torch.empty_like(x[2]), **options)


def decode_sides(N: int, rotating: bool) -> dict[str, Run]:
    x, state = tokens(N, 1), states(N)
    want = exact("decode", x, state)
    sides: dict[str, Run] = {}
    for dtype, name in NAMES.items():
        narrow = (*(y.to(dtype) for y in x[:3]), *x[3:])
        call = decode_call(narrow, state.to(dtype, copy=True))
        for got, exactly in zip(call(), want, strict=True):
            check(got, exactly, BOUNDS[dtype])
        size = state_bytes(N, dtype) if rotating else math.inf
        sides[name] = launches(
            lambda y=narrow, d=dtype: decode_call(y, state.to(d, copy=True)), size
        )
    wide, size = state.mT.contiguous(), state_bytes(N) if rotating else math.inf
    sides["onnxruntime"] = onnx_attention(x, *(wide.clone() for _ in range(sets_of(size))))
    sides["transformers"] = rotate(
        lambda: stock("torch_recurrent_gated_delta_rule", x, wide.clone()), size
    )
    sides["floor"] = rotate(lambda: floor(torch.ones(N, HV, WIDTH, WIDTH)), size)
    sides["floor16"] = rotate(lambda: floor(torch.ones(N, HV, WIDTH, WIDTH // 2)), size / 2)
    return sides


def states16() -> None:
    for N, bound in ((1, 1.0), (8, 1.6), (32, 1.6)):
        goals = {f"{n} over f32": ("f32", n, ">=", bound) for n in HALVES}
        show(f"decode N={N}", medians(decode_sides(N, True), ROUNDS), goals)


def cached() -> None:
    goals = {f"{n} over f32": ("f32", n, ">=", 1.0) for n in HALVES}
    show("decode N=1, in cache", medians(decode_sides(1, False), ROUNDS), goals)


def layer() -> None:
    """Both with normalised keys and raw gates, as a layer has them."""
    A_log, dt_bias = torch.randn(HV), torch.randn(HV)
    weights = {
        "conv_weight": 0.3 * torch.randn(CHANNELS, TAPS),
        "A_log": A_log,
        "dt_bias": dt_bias,
        "norm_weight": torch.rand(WIDTH),
    }
    for N in (8, 32):
        pairs = (
            (torch.randn(N, CHANNELS), torch.randn(N, HV * WIDTH)),
            (torch.randn(N, HV), torch.randn(N, HV)),
        )
        x, out = tokens(N, 1), torch.empty(N, HV * WIDTH)

        def make(N: int = N, pairs: Any = pairs, out: torch.Tensor = out) -> Run:
            windows = {"conv_state": torch.randn(N, CHANNELS, TAPS - 1), "state": states(N)}
            return on_cpu("step", *pairs, **weights, **windows, out=out)

        call = make()
        exactly = {n: y.double() for n, y in call.keywords.items() if n not in ("out", "backend")}
        wide = [tuple(y.double() for y in pair) for pair in pairs]
        want = sluice.step(*wide, **exactly, backend="reference")
        check(call(), want, 1e-5)
        sides = {
            "decode": launches(
                lambda y=x, N=N: decode_call(y, states(N), normalize_qk=True), state_bytes(N)
            ),
            "step": launches(make, state_bytes(N)),
        }
        goals = {"step over decode": ("step", "decode", "<=", 1.3)}
        show(f"step N={N}", medians(sides, ROUNDS), goals)


def draft() -> None:
    """Verify of four tokens, then commit of all of them."""
    for N in (8, 32):
        x, single, state = tokens(N, 4), tokens(N, 1), states(N)
        want = exact("decode", x, state)
        o, found = on_cpu("verify", *x, state=state)()
        check(o, want[0], 1e-5)
        check(on_cpu("commit", found, torch.full((N,), 4))(), want[1], 1e-5)
        pools = [states(N) for _ in range(sets_of(state_bytes(N)))]
        verify = [on_cpu("verify", *x, state=s, out=torch.empty_like(x[2])) for s in pools]
        commit = [on_cpu("commit", v()[1], torch.full((N,), 4)) for v in verify]
        first, second = launch_of(*verify), launch_of(*commit)

        def both(first: Run = first, second: Run = second) -> None:
            first()
            second()

        sides = {
            "decode": launches(lambda y=single, N=N: decode_call(y, states(N)), state_bytes(N)),
            "verify and commit": both,
        }
        bound = {8: {"verify and commit": ("verify and commit", "decode", "<=", 2.6)}}
        show(f"draft N={N}, T=4", medians(sides, ROUNDS), bound.get(N, {}))


# -- prompts --------------------------------------------------------------------------------------


def copy(elements: int, dtype: torch.dtype) -> Run:
    """Copies that read and write so many elements in all, never from a cache."""

    def make() -> Run:
        source = torch.ones(elements // 2, dtype=dtype)
        return partial(torch.empty_like(source).copy_, source)

    return rotate(make, elements * dtype.itemsize)


def conv_call(op: str, x: torch.Tensor, others: tuple[Any, ...], **options: Any) -> Run:
    """A convolution of a copy of x, into tensors of its own; ``others``: weight, bias, window."""
    weight, bias, window = others
    call = on_cpu(op, x.clone(), weight, bias, state=window.clone(), **options)
    out = call()
    return partial(call, out=out if op == "conv_qkv" else out[0])


def memory() -> None:
    heads = {"num_k_heads": HK, "num_v_heads": HV}
    others = (
        0.3 * torch.randn(CHANNELS, TAPS),
        torch.randn(CHANNELS),
        torch.randn(1, CHANNELS, TAPS - 1),
    )
    *fixed, window = (y.double() for y in others)
    for T in (512, 2048):
        gates = {"a": torch.randn(1, T, HV), "b": torch.randn(1, T, HV), "A_log": torch.randn(HV)}
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(1, T, CHANNELS).to(dtype)
            sides: dict[str, Run] = {}
            for op, given in (("conv_qkv", gates), ("causal_conv1d", {})):
                options = heads if op == "conv_qkv" else {}
                double = {n: y.double() for n, y in given.items()} | options
                want = getattr(sluice, op)(
                    x.double(), *fixed, state=window.clone(), **double, backend="reference"
                )
                make = partial(conv_call, op, x, others, **given, **options)
                made = make().keywords["out"]
                check(made[0] if op == "conv_qkv" else made, want[0], BOUNDS[dtype])
                sides[op] = launches(make, 2 * x.numel() * dtype.itemsize)
            sides["copy"] = copy(2 * x.numel(), dtype)
            names = ("conv_qkv", "causal_conv1d")
            goals = {f"{op}, share of a copy": ("copy", op, ">=", 0.6) for op in names}
            show(f"conv T={T} {NAMES[dtype]}", medians(sides, 7), goals)


def norm() -> None:
    T, weight = 2048, torch.rand(WIDTH)
    for dtype in (torch.float32, torch.bfloat16):
        x, z = (torch.randn(1, T, HV, WIDTH).to(dtype) for _ in "xz")
        exactly = (y.double() for y in (x, z, weight))
        want = sluice.rms_norm_gated(*exactly, backend="reference")
        check(on_cpu("rms_norm_gated", x, z, weight)(), want, BOUNDS[dtype])

        def make(x: torch.Tensor = x, z: torch.Tensor = z) -> Run:
            out = torch.empty_like(x)
            return on_cpu("rms_norm_gated", x.clone(), z.clone(), weight, out=out)

        size = 3 * x.numel() * dtype.itemsize
        sides = {"norm": launches(make, size), "copy": copy(3 * x.numel(), dtype)}
        goals = {"share of a copy": ("copy", "norm", ">=", 0.7)}
        show(f"rms_norm_gated {NAMES[dtype]}", medians(sides, ROUNDS), goals)


def prompt() -> None:
    for T in (512, 2048):
        x, state = tokens(1, T), states(1)
        want = exact("prefill", x, state)
        call = on_cpu("prefill", *x, state=state.clone(), out=torch.empty_like(x[2]))
        for got, exactly in zip(call(), want, strict=True):
            check(got, exactly, 1e-5)
        half = (*(y.bfloat16() for y in x[:3]), *x[3:])
        short = on_cpu("prefill", *half, state=state.clone(), out=torch.empty_like(half[2]))
        check(short()[0], want[0], 1e-2)
        wide = state.mT.contiguous()
        sides = {
            "prefill": launch_of(call),
            "bf16": launch_of(short),
            "onnxruntime": onnx_attention(x, wide),
            "transformers": stock("torch_chunk_gated_delta_rule", x, wide),
        }
        goals = {"over ONNX Runtime": ("onnxruntime", "prefill", ">=", 2.0)}
        show(f"prefill T={T}", medians(sides, 5), goals)


# -- threads and processes ------------------------------------------------------------------------


def operators() -> Iterator[tuple[str, Run]]:
    """A call of every operator, as a layer of a model makes them."""
    weight, bias, norm_weight = 0.3 * torch.randn(CHANNELS, TAPS), None, torch.rand(WIDTH)
    heads = {"num_k_heads": HK, "num_v_heads": HV}
    gates = {"A_log": torch.randn(HV), "dt_bias": torch.randn(HV)}
    for N in (1, 8):
        x, four, windows = tokens(N, 1), tokens(N, 4), torch.randn(N, CHANNELS, TAPS - 1)
        pairs = (torch.randn(N, CHANNELS), torch.randn(N, HV * WIDTH)), torch.randn(N, 2 * HV)
        yield f"decode N={N}", decode_call(x, states(N))
        yield (
            f"step N={N}",
            on_cpu(
                "step", *pairs, conv_weight=weight, norm_weight=norm_weight, **gates,
                conv_state=windows, state=states(N), out=torch.empty(N, HV * WIDTH),
            ),
        )  # fmt: skip
        verify = on_cpu("verify", *four, state=states(N), out=torch.empty_like(four[2]))
        yield f"verify, commit N={N}", partial(drafted, verify, torch.full((N,), 4))
    for T in (1, 512):
        x, window = torch.randn(1, T, CHANNELS), torch.randn(1, CHANNELS, TAPS - 1)
        raw = {"a": torch.randn(1, T, HV), "b": torch.randn(1, T, HV), **gates, **heads}
        for op, more in (("conv_qkv", raw), ("causal_conv1d", {})):
            call = on_cpu(op, x, weight, bias, state=window.clone(), **more)
            out = call()
            yield f"{op} T={T}", partial(call, out=out if op == "conv_qkv" else out[0])
        v = torch.randn(T, HV, WIDTH)
        out = torch.empty_like(v)
        yield f"rms_norm_gated T={T}", on_cpu("rms_norm_gated", v, v.clone(), norm_weight, out=out)
    x = tokens(1, 512)
    yield "prefill T=512", on_cpu("prefill", *x, state=states(1), out=torch.empty_like(x[2]))


def drafted(verify: Run, accepted: torch.Tensor) -> None:
    """A draft and its commit."""
    sluice.commit(verify()[1], accepted, backend="cpu")


def with_threads(run: Run, count: int) -> Run:
    def call() -> None:
        torch.set_num_threads(count)
        run()

    return call


def cores() -> None:
    """The whole public call; a side sets the number of threads before each of its calls."""
    before = torch.get_num_threads()
    for name, run in operators():
        sides = {f"{n} threads": with_threads(run, n) for n in (1, 2)}
        found = medians(sides, 5)
        ratio = found["1 threads"] / found["2 threads"]
        print(
            f"{name:24}1 thread {found['1 threads']:.1f}  2 threads {found['2 threads']:.1f}"
            f"  {ratio:.2f} times faster"
        )
    torch.set_num_threads(before)


COLD = """
import os, tempfile, time, torch
os.environ["NUMBA_CACHE_DIR"] = tempfile.mkdtemp()
start = time.perf_counter()
import sluice
sluice.warmup("Qwen3.5-4B", device="cpu")
print(time.perf_counter() - start)
"""


def seconds(program: str) -> float:
    """What a program prints, run as where packages are installed: with the bytecode of modules."""
    command = ["env", "-u", "PYTHONDONTWRITEBYTECODE", sys.executable, "-c", program]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(done.stdout.split()[-1])


def start() -> None:
    program = START[: START.rindex("print(")] + "print(time.perf_counter() - start)\n"
    seconds(program)  # fills the cache, if it is empty
    found = sorted(seconds(program) for _ in range(7))
    times = {"median": statistics.median(found), "goal": 0.4}
    print(f"{'import and first call':24}seconds {', '.join(f'{x:.2f}' for x in found)}")
    show("", times, {"seconds over 0.4": ("median", "goal", "<=", 1.0)})


def cold() -> None:
    times = {"seconds": seconds(COLD), "goal": 10.0}
    show("a model's kernels, cold", times, {"seconds over 10": ("seconds", "goal", "<=", 1.0)})


def main() -> None:
    named = {"states": states16, "one": one, "packed": packed}
    lines = (cached, memory, norm, layer, draft, prompt, cores, start, cold)
    run_lines(named | {f.__name__: f for f in lines})


if __name__ == "__main__":
    main()
