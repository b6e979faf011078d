"""The CPU kernels against their floor and their peers, as the ratios they were built to reach.

    PYTHONPATH=src python benchmarks/cpu_targets.py [LINE ...]

Lines: decode, step, verify, prefill, conv, growth, start; by default all of them.

All sides of a line take turns in one process with the same threads, in bursts with a pause before
each; a number is the median of the bursts' medians, in microseconds. States are used again and
again, so small ones stay in a cache, as they do for the peers. Every line is printed only after its
output matched float64. The floor reads and writes the states with as many threads, and does nothing
else. "launch" is the bound call of the backend, "call" the public function.

A burst during which other processes had a core for more than 2% of the time is measured again, up
to three times; how many were kept in spite of that is printed. Where others keep the machine busy
all the time, ``--least`` as the first argument prints the least time of each side instead.
"""
# ruff: noqa: T201

from __future__ import annotations

import inspect
import os
import platform
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from itertools import chain, cycle
from pathlib import Path
from typing import Any

import numba
import torch
from torch.nn import functional

import sluice
from sluice import calls, dispatch
from sluice.backends.cpu.block import Fields
from sluice.backends.cpu.jit import jit
from sluice.backends.cpu.kernel import Kernel
from sluice.backends.cpu.launch import bind_fields
from sluice.backends.cpu.llvm import F32, LANES
from sluice.backends.cpu.simd import load, pointer, splat, store
from sluice.backends.cpu.threads import tasks_of

HK, HV, WIDTH, TAPS = 16, 32, 128, 4
CHANNELS = (2 * HK + HV) * WIDTH

Run = Callable[[], Any]

FLOOR = Fields("floor", "state", "floats")
view = FLOOR.view


@jit
def _touch(s, count):
    for i in range(0, count, 4 * LANES):
        for j in range(i, i + 4 * LANES, LANES):
            store(s, j, load(s, j) * splat(1.0000001))


def floor_kernel(block: Any) -> None:
    p = view(block)
    for i in tasks_of(p):
        _touch(pointer(p.state, F32) + i * p.floats, p.floats)


FLOOR_KERNEL = Kernel("floor", floor_kernel)


def floor(state: torch.Tensor) -> Run:
    """Read and write every state once."""
    heads, floats = state.shape[0] * state.shape[1], state[0, 0].numel()
    values = {"floats": floats}
    launch = bind_fields(FLOOR_KERNEL, FLOOR, values, {"state": 0}, lambda _: {"tasks": heads})
    return lambda: launch([state])


# -- timing -------------------------------------------------------------------------------------


class Bursts:
    """The times of some sides that take turns, in seconds: a list of bursts for each."""

    def __init__(self, sides: dict[str, Run], rounds: int, seconds: float, alone: bool) -> None:
        self.disturbed = 0
        self.found: dict[str, list[list[float]]] = {name: [] for name in sides}
        for run in sides.values():
            run()
        for _ in range(rounds):
            for name in random.sample(list(sides), len(sides)):
                self.found[name].append(self._burst(sides[name], seconds, 3 if alone else 1))

    def _burst(self, run: Run, seconds: float, tries: int) -> list[float]:
        for left in range(tries, 0, -1):
            time.sleep(0.02)  # threads that another side left spinning go to sleep
            samples: list[float] = []
            run()
            used, begin = others_seconds(), time.perf_counter()
            while not samples or time.perf_counter() < begin + seconds:
                start = time.perf_counter()
                run()
                samples.append(time.perf_counter() - start)
            used = others_seconds() - used
            if tries == 1 or used <= max(0.02 * (time.perf_counter() - begin), 0.011):
                break
            self.disturbed += left == 1
        return samples

    def medians(self) -> dict[str, float]:
        """Microseconds: the median of the bursts' medians."""
        middle = {name: map(statistics.median, x) for name, x in self.found.items()}
        return {name: 1e6 * statistics.median(x) for name, x in middle.items()}

    def least(self) -> dict[str, float]:
        """Microseconds of the fastest call."""
        return {name: 1e6 * min(chain(*x)) for name, x in self.found.items()}

    def means(self) -> dict[str, float]:
        """Microseconds per call, over all calls."""
        return {n: 1e6 * statistics.fmean(chain(*x)) for n, x in self.found.items()}

    def last(self, share: float) -> dict[str, float]:
        """Microseconds that only a share of the calls exceeds."""
        times = {name: sorted(chain(*x)) for name, x in self.found.items()}
        return {name: 1e6 * x[int((1 - share) * (len(x) - 1))] for name, x in times.items()}


def others_seconds() -> float:
    """Core seconds that other processes have had so far; 0 where Linux does not say."""
    stat = Path("/proc/stat")
    if not stat.is_file():
        return 0.0
    ticks = [int(x) for x in stat.read_text().split("\n", 1)[0].split()[1:9]]
    busy = sum(ticks) - ticks[3] - ticks[4]
    mine = os.times()
    return busy / os.sysconf("SC_CLK_TCK") - mine.user - mine.system


def medians(sides: dict[str, Run], rounds: int = 15, seconds: float = 0.05) -> dict[str, float]:
    """Median microseconds of each side (with ``--least``, the least); they take turns randomly."""
    least = sys.argv[1:2] == ["--least"]
    bursts = Bursts(sides, rounds, seconds, alone=not least)
    if least:
        return bursts.least()
    if bursts.disturbed:
        print(f"{'':24}{bursts.disturbed} bursts were disturbed")
    return bursts.medians()


def show(
    title: str, times: dict[str, float], goals: dict[str, tuple[str, str, str, float]]
) -> None:
    """One line of times, then each goal: (side, over, "<=" or ">=", bound)."""
    print(f"{title:24}" + "  ".join(f"{name} {t:.1f}" for name, t in times.items()))
    for text, (side, over, sense, bound) in goals.items():
        ratio = times[side] / times[over]
        kept = ratio <= bound if sense == "<=" else ratio >= bound
        print(f"{'':24}{'ok  ' if kept else 'MISS'} {text}: {ratio:.2f} ({sense} {bound})")


def launch_of(*same: Run) -> Run:
    """The bound call of the backend alone, with the tensors of a public call.

    Of several calls with equal metadata, each launch takes the next one's tensors.
    """
    made, spec = [], None
    for call in same:
        with calls.check_only() as found:
            call()
        spec, tensors = found[0]
        made.append([_made(x) for x in tensors])
    launch, turns = dispatch.choose(spec, "cpu").launch, cycle(made)
    return partial(launch, made[0]) if len(made) == 1 else lambda: launch(next(turns))


def _made(x: torch.Tensor | None) -> torch.Tensor | None:
    """A tensor, where a public call would make one."""
    if x is None or not x.is_meta:
        return x
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)


def check(got: torch.Tensor, want: torch.Tensor, bound: float) -> None:
    error = float((got.double() - want).norm() / want.norm())
    assert error <= bound, f"relative error {error:.1e}"


# -- inputs and peers ---------------------------------------------------------------------------


def tokens(N: int, T: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    q, k = (torch.randn(N, T, HK, WIDTH).to(dtype) for _ in "qk")
    k = functional.normalize(k, dim=-1)
    v = torch.randn(N, T, HV, WIDTH).to(dtype)
    return q, k, v, -0.05 * torch.rand(N, T, HV), torch.rand(N, T, HV)


def exact(name: str, x: tuple[torch.Tensor, ...], state: torch.Tensor) -> tuple[Any, Any]:
    """The reference's output and state, in float64."""
    wide = [y.double() for y in x]
    return getattr(sluice, name)(*wide, state=state.double(), backend="reference")


Named = dict[str, torch.Tensor]


def onnx_session(node: Any, *sets: tuple[Named, Named]) -> Run:
    """ONNX Runtime's kernel on given inputs, outputs written where they are bound.

    Of several sets of both, each run takes the next.
    """
    import numpy as np
    import onnxruntime
    from onnx import TensorProto, helper

    def info(named: Named) -> list[Any]:
        return [
            helper.make_tensor_value_info(n, TensorProto.FLOAT, list(x.shape))
            for n, x in named.items()
        ]

    graph = helper.make_graph([node], "one", *map(info, sets[0]))
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    bindings = []
    for inputs, outputs in sets:
        binding = session.io_binding()
        for n, x in inputs.items():
            binding.bind_input(n, "cpu", 0, np.float32, tuple(x.shape), x.data_ptr())
        for n, x in outputs.items():
            binding.bind_output(n, "cpu", 0, np.float32, tuple(x.shape), x.data_ptr())
        bindings.append(binding)
    turns = cycle(bindings)
    return lambda: (session.run_with_iobinding(next(turns)), sets)


def onnx_attention(x: tuple[torch.Tensor, ...], *states: torch.Tensor) -> Run:
    """LinearAttention in place; its states are [N, HV, K, V]."""
    from onnx import helper

    q, k, v, g, beta = x
    flat = dict(zip("qkv", (y.flatten(2) for y in (q, k, v)), strict=True))
    node = helper.make_node(
        "LinearAttention",
        ["q", "k", "v", "s", "g", "b"],
        ["o", "t"],
        domain="com.microsoft",
        q_num_heads=HK,
        kv_num_heads=HV,
        update_rule="gated_delta",
    )
    o = torch.empty_like(flat["v"])
    sets = [({**flat, "s": s, "g": g, "b": beta}, {"o": o, "t": s}) for s in states]
    return onnx_session(node, *sets)


def onnx_conv(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, window: torch.Tensor
) -> Run:
    """CausalConvWithState with silu; its x is [N, D, T], and it writes a window of its own."""
    from onnx import helper

    node = helper.make_node(
        "CausalConvWithState",
        ["x", "w", "c", "s"],
        ["y", "t"],
        domain="com.microsoft",
        activation="silu",
    )
    inputs = {"x": x, "w": weight[:, None], "c": bias, "s": window}
    return onnx_session(node, (inputs, {"y": torch.empty_like(x), "t": torch.empty_like(window)}))


def stock(name: str, x: tuple[torch.Tensor, ...], state: torch.Tensor) -> Run:
    """A torch function of transformers, with the repeats its layer makes."""
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen

    q, k, v, g, beta = x
    function = inspect.unwrap(getattr(qwen, name))  # not FLA's, if that is installed

    def run() -> Any:
        wide = (y.repeat_interleave(HV // HK, 2) for y in (q, k))
        return function(*wide, v, g, beta, initial_state=state, output_final_state=True)

    return run


# -- lines --------------------------------------------------------------------------------------


def on_cpu(name: str, *args: Any, **options: Any) -> Run:
    """A public call, on this backend."""
    return partial(getattr(sluice, name), *args, backend="cpu", **options)


def narrow(x: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """The same tokens in bfloat16; gates stay float32."""
    return (*(y.bfloat16() for y in x[:3]), *x[3:])


def states(N: int) -> torch.Tensor:
    return torch.randn(N, HV, WIDTH, WIDTH)


def sequence_sides(op: str, x: tuple[torch.Tensor, ...], peer: str) -> dict[str, Run]:
    """Every side of a decode or prefill line, after checking both dtypes."""
    state, half = states(len(x[0])), narrow(x)
    want = exact(op, x, state)
    calls = [on_cpu(op, *y, state=state.clone(), out=torch.empty_like(y[2])) for y in (x, half)]
    for call, bound in zip(calls, (1e-5, 1e-2), strict=True):
        for got, exactly in zip(call(), want, strict=True):
            check(got, exactly, bound)
    return {
        "launch": launch_of(calls[0]),
        "bf16": launch_of(calls[1]),
        "call": calls[0],
        "onnxruntime": onnx_attention(x, state.mT.contiguous()),
        "transformers": stock(peer, x, state.mT.contiguous()),
    }


def decode() -> None:
    for N in (1, 8, 32):
        sides = sequence_sides("decode", tokens(N, 1), "torch_recurrent_gated_delta_rule")
        sides["floor"] = floor(torch.ones(N, HV, WIDTH, WIDTH))
        goals = {
            "over the floor": ("launch", "floor", "<=", 1.7 if N == 1 else 1.35),
            "transformers": ("transformers", "launch", ">=", 15.0),
            "bf16 inputs": ("bf16", "launch", "<=", 1.25),
        }
        if N == 1:
            goals["ONNX Runtime in place"] = ("onnxruntime", "call", ">=", 1.5)
        elif N == 8:
            goals["ONNX Runtime in place"] = ("onnxruntime", "call", ">=", 2.0)
        show(f"decode N={N}", medians(sides), goals)


def prefill() -> None:
    for T in (512, 2048):
        sides = sequence_sides("prefill", tokens(1, T), "torch_chunk_gated_delta_rule")
        goals = {
            "transformers' chunks": ("transformers", "launch", ">=", 4.0),
            "ONNX Runtime": ("onnxruntime", "launch", ">=", 1.7),
            "bf16 inputs": ("bf16", "launch", "<=", 1.25),
        }
        show(f"prefill T={T}", medians(sides, 7), goals)


def step() -> None:
    for N in (1, 8, 32):
        weights = {
            "conv_weight": 0.3 * torch.randn(CHANNELS, TAPS),
            "A_log": torch.randn(HV),
            "dt_bias": torch.randn(HV),
            "norm_weight": torch.rand(WIDTH),
            "conv_state": torch.randn(N, CHANNELS, TAPS - 1),
            "state": states(N),
        }
        pairs = (
            (torch.randn(N, CHANNELS), torch.randn(N, HV * WIDTH)),
            (torch.randn(N, HV), torch.randn(N, HV)),
        )
        exactly = {name: x.double() for name, x in weights.items()}
        wide = [tuple(y.double() for y in pair) for pair in pairs]
        want = sluice.step(*wide, **exactly, backend="reference")
        call = on_cpu("step", *pairs, **weights, out=torch.empty(N, HV * WIDTH))
        check(call(), want, 1e-5)
        x = tokens(N, 1)
        bare = on_cpu("decode", *x, normalize_qk=True, state=states(N), out=torch.empty_like(x[2]))
        sides = {"decode": launch_of(bare), "step": launch_of(call), "call": call}
        goals = {"over bare decode": ("step", "decode", "<=", 1.3)} if N >= 8 else {}
        show(f"step N={N}", medians(sides), goals)


def verify() -> None:
    for N in (8, 32):
        x, one, state = tokens(N, 4), tokens(N, 1), states(N)
        want = exact("decode", x, state)
        draft_of = on_cpu("verify", *x, state=state, out=torch.empty_like(x[2]))
        o, draft = draft_of()
        commit = on_cpu("commit", draft, torch.full((N,), 4))
        check(o, want[0], 1e-5)
        check(commit(), want[1], 1e-5)
        parts = launch_of(draft_of), launch_of(commit)
        bare = on_cpu("decode", *one, state=states(N), out=torch.empty_like(one[2]))
        sides = {
            "decode": launch_of(bare),
            "verify": parts[0],
            "commit": parts[1],
            "both": partial(_each, parts),
        }
        goals = {"T=4 and commit over decode": ("both", "decode", "<=", 2.2)}
        show(f"verify N={N}", medians(sides), goals)


def _each(runs: tuple[Run, ...]) -> None:
    for run in runs:
        run()


def _plain_conv(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Any:
    """What a layer does with torch: x [B, T, D] as it comes, and parts of the result [B, T, D]."""
    padded = functional.pad(x.mT, (TAPS - 1, 0))
    y = functional.silu(functional.conv1d(padded, weight, bias, groups=CHANNELS)).mT
    return y.split([HK * WIDTH, HK * WIDTH, HV * WIDTH], -1)


def conv() -> None:
    for T in (512, 2048):
        x, weight = torch.randn(1, T, CHANNELS), 0.3 * torch.randn(CHANNELS, TAPS)
        bias, window = torch.randn(CHANNELS), torch.randn(1, CHANNELS, TAPS - 1)
        given = (x, weight, bias)
        gates = {"a": torch.randn(1, T, HV), "b": torch.randn(1, T, HV), "A_log": torch.randn(HV)}
        heads = {"num_k_heads": HK, "num_v_heads": HV}
        exactly = {name: y.double() for name, y in {**gates, "state": window}.items()}
        want = sluice.conv_qkv(
            *(y.double() for y in given), **exactly, **heads, backend="reference"
        )
        sides: dict[str, Run] = {}
        for name, inputs in (("launch", given), ("bf16", (x.bfloat16(), weight, bias))):
            call = on_cpu("conv_qkv", *inputs, state=window.clone(), **gates, **heads)
            out = call()
            for got, exact_one in zip(out, want, strict=True):
                check(got, exact_one, 1e-5 if name == "launch" else 1e-2)
            sides[name] = launch_of(partial(call, out=out))
        sides["onnxruntime"] = onnx_conv(x.mT.contiguous(), weight, bias, window)
        sides["torch"] = partial(_plain_conv, x, weight[:, None], bias)
        goals = {
            "ONNX Runtime's conv alone": ("onnxruntime", "launch", ">=", 6.0),
            "torch conv1d and split": ("torch", "launch", ">=", 3.0),
            "bf16 inputs": ("bf16", "launch", "<=", 1.25),
        }
        show(f"conv_qkv T={T}", medians(sides, 7), goals)


def megabytes_more(run: Run) -> float:
    """How far the resident memory rises above where it stood, while a call runs."""

    def resident(line: str) -> int:
        status = Path("/proc/self/status").read_text()
        return int(re.findall(rf"^{line}:\s+(\d+) kB", status, re.MULTILINE)[0])

    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    before = resident("VmRSS")
    run()
    return (resident("VmHWM") - before) / 1024


def growth() -> None:
    for T in (512, 4096, 32768, 65536):
        x = tokens(1, T)
        call = on_cpu("prefill", *x, state=states(1), out=x[2].clone())
        more = megabytes_more(call)  # of a first call: later ones find the scratch memory there
        each = medians({"t": launch_of(call)}, 5)["t"] / T
        print(f"prefill T={T:<6} {each:.2f} us per token, {more:.1f} MB more memory")
    for N in (8, 16, 32, 64, 128):
        x = tokens(N, 1)
        call = on_cpu("decode", *x, state=states(N), out=x[2].clone())
        more = megabytes_more(call)
        sides = {"floor": floor(torch.ones(N, HV, WIDTH, WIDTH)), "decode": launch_of(call)}
        each = {name: f"{t / N:.1f}" for name, t in medians(sides, 7).items()}
        print(f"decode N={N:<4} us per sequence: {each}, {more:.1f} MB more memory")


START = """
import time, torch
start = time.perf_counter()
import sluice
x, v, g = torch.randn(1, 1, 16, 128), torch.randn(1, 1, 32, 128), torch.zeros(1, 1, 32)
sluice.decode(x, x, v, g, g, state=torch.zeros(1, 32, 128, 128))
print(f"import sluice and a first decode: {time.perf_counter() - start:.2f} s after import torch")
"""
COLD = """
import os, tempfile, time, torch
os.environ["NUMBA_CACHE_DIR"] = tempfile.mkdtemp()
from sluice.backends import cpu
start = time.perf_counter()
cpu.compile_kernels(cpu.kernels())
print(f"all kernels compiled: {time.perf_counter() - start:.1f} s")
"""


def start() -> None:
    shown = False
    for program in (START, START, COLD):
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        if program != START or shown:  # the first start fills the cache, if it is empty
            print(done.stdout, end="")
        shown = True


def machine() -> Iterator[str]:
    """Processor, caches, threads, versions and commit."""
    info, name = Path("/proc/cpuinfo"), platform.processor() or platform.machine()
    if info.is_file():
        models = re.findall(r"^model name\s*: (.*)$", info.read_text(), re.MULTILINE)
        name = models[0] if models else name
    caches = []
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size = ((index / x).read_text().strip() for x in ("level", "type", "size"))
        caches.append(f"L{level} {kind.lower()} {size}")
    yield f"{name}, {os.cpu_count()} cores ({', '.join(caches)}), {torch.get_num_threads()} threads"
    yield f"vectors of {LANES} float32 lanes, clock while adding {clock():.2f} GHz"
    packages = ("torch", "numba", "onnxruntime", "transformers")
    yield ", ".join(f"{package} {version(package)}" for package in packages)
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    done = subprocess.run(git, capture_output=True, text=True, check=False)
    yield f"commit {done.stdout.strip() or 'unknown'}"


@numba.njit
def _additions(count: int) -> float:
    x = 0.0
    for _ in range(count):
        x += 1e-9
    return x


def clock() -> float:
    """Gigahertz, if an addition takes the three cycles it takes on Zen 4."""
    _additions(1)
    start = time.perf_counter()
    _additions(3_000_000)
    return 3 * 3e6 / (time.perf_counter() - start) / 1e9


def run_lines(lines: dict[str, Callable[[], None]], times: str = "medians") -> None:
    """Print the machine, then the lines that the command names, or all of them."""
    least, wanted = sys.argv[1:2] == ["--least"], [x for x in sys.argv[1:] if x != "--least"]
    torch.manual_seed(0)
    print("\n".join(machine()))
    times = "least times" if least else times
    print(f"float32 unless said otherwise, {HK}/{HV} heads, K = V = {WIDTH}; microseconds, {times}")
    for name in wanted or list(lines):
        lines[name]()


def main() -> None:
    lines = {f.__name__: f for f in (decode, step, verify, prefill, conv, growth, start)}
    run_lines(lines)


if __name__ == "__main__":
    main()
