"""Time the configurations of the memory-bound kernels against each other, on this machine's GPU.

    PYTHONPATH=src python benchmarks/gpu_configs.py [copy decode verify step conv_qkv] [--quick]
    PYTHONPATH=src python benchmarks/gpu_configs.py decode_kv verify_kv step_kv    # states [K, V]
    PYTHONPATH=src python benchmarks/gpu_configs.py prefill_key    # decay per key, both ways
    PYTHONPATH=src python benchmarks/gpu_configs.py check --part 0/8    # and 1/8, .. side by side

This is where the rows of backends/triton/configs.py come from. A line is printed only after its
output matched the reference backend's. Times are CUDA graph replays of calls that each have inputs,
pool rows and outputs of their own, together five times the L2 cache, so that every call finds it
cold; a number is the median, in microseconds. "now" is what configs.py holds.
"""
# ruff: noqa: T201

from __future__ import annotations

import argparse
import contextlib
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
import triton.language as tl

import sluice
from sluice.backends.triton import configs
from sluice.backends.triton.configs import ANY, KEEP, STREAM, Config, Row
from sluice.backends.triton.kernels.math import begin
from sluice.calls import forget

COLD = 5 * 60 * 2**20
HK, HV, K, V = 16, 32, 128, 128
D = 2 * HK * K + HV * V
FP32, BF16 = torch.float32, torch.bfloat16
SHORT = {FP32: "fp32", BF16: "bf16"}
LARGE = (1, 8, 32, 64, 128, 256)
Call = Callable[[], Any]


# ------------------------------------------------------------------------------------- measuring


def microseconds(calls: list[Call], replays: int = 15) -> float:
    """The time of a call: a replay of all of them in one graph, over their number."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(replays + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times[2:])


def sets_for(bytes_each: int, least: int = 3) -> int:
    """How many sets of buffers keep the cache cold."""
    return max(least, min(200, -(-COLD // bytes_each)))


def matches(actual: torch.Tensor, exact: torch.Tensor) -> None:
    limit = 1e-4 if actual.dtype == exact.dtype == FP32 else 1e-2
    error = ((actual.double() - exact.double()).norm() / exact.double().norm()).item()
    if not error <= limit:
        raise AssertionError(f"relative error {error:.2e} above {limit:.0e}")


class Layer:
    """The tensors of one layer's decode: ``sets`` batches of N rows of T tokens in one pool."""

    def __init__(self, N: int, T: int, state: torch.dtype, sets: int, layout: str = "vk") -> None:
        gen = torch.Generator("cuda").manual_seed(N * 1000 + T)

        def randn(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
            return torch.randn(*shape, generator=gen, device="cuda", dtype=dtype)

        P = sets * N
        self.sets, self.layout = sets, layout
        self.qkvz = [randn(N, T, D + HV * V) for _ in range(sets)]
        self.ba = [randn(N, T, 2 * HV) for _ in range(sets)]
        self.state = randn(P, HV, V, K, dtype=FP32).mul_(0.3).to(state)
        self.conv_state = randn(P, 3, D).transpose(1, 2)
        slots = torch.randperm(P, generator=gen, device="cuda").to(torch.int32)
        self.slots = [slots[i * N : (i + 1) * N].clone() for i in range(sets)]
        self.A_log = torch.rand(HV, generator=gen, device="cuda").add_(0.1).log()
        self.dt_bias = randn(HV, dtype=FP32)
        self.conv_weight, self.norm_weight = randn(D, 4), randn(V)
        self.accepted = torch.full((N,), T, dtype=torch.int32, device="cuda")

    def delta(self, i: int) -> dict[str, Any]:
        q, k, v, _ = self.qkvz[i].split([HK * K, HK * K, HV * V, HV * V], dim=-1)
        b, a = self.ba[i].split([HV, HV], dim=-1)
        heads = {"q": (q, HK), "k": (k, HK), "v": (v, HV)}
        options = {"normalize_qk": True, "state": self.state, "slots": self.slots[i]}
        options["state_layout"] = self.layout
        gates = {"g": a, "beta": b, "A_log": self.A_log, "dt_bias": self.dt_bias}
        return {n: x.unflatten(-1, (H, -1)) for n, (x, H) in heads.items()} | gates | options

    def decode(self, i: int, backend: str = "triton") -> torch.Tensor:
        return sluice.decode(**self.delta(i), backend=backend)[0]

    def verify(self, i: int, backend: str = "triton") -> torch.Tensor:
        """Both halves: verify, then commit of all tokens."""
        o, draft = sluice.verify(**self.delta(i), backend=backend)
        sluice.commit(draft, self.accepted, backend=backend)
        return o

    def step(self, i: int, backend: str = "triton") -> torch.Tensor:
        names = ("conv_weight", "A_log", "dt_bias", "norm_weight", "conv_state", "state")
        options = {name: getattr(self, name) for name in names}
        options |= {"slots": self.slots[i], "state_layout": self.layout}
        return sluice.step(self.qkvz[i], self.ba[i], **options, backend=backend)

    def check(self, op: str) -> None:
        """Output and states of the first batch against the reference backend's."""
        saved = self.state.clone(), self.conv_state.clone()
        mine = getattr(self, op)(0)
        states = self.state.clone(), self.conv_state.clone()
        self.state.copy_(saved[0])
        self.conv_state.copy_(saved[1])
        matches(mine, getattr(self, op)(0, backend="reference"))
        matches(states[0], self.state.float() if mine.dtype != FP32 else self.state)
        if not torch.equal(states[1], self.conv_state):
            raise AssertionError("conv state differs")


def state_bytes(N: int, state: torch.dtype) -> int:
    """Bytes of the states, read and written once."""
    return 2 * N * HV * K * V * state.itemsize


def time_layer(op: str, N: int, state: torch.dtype, T: int = 1, layout: str = "vk") -> float:
    Layer(min(N, 3), T, state, 1, layout).check(op)
    layer = Layer(N, T, state, sets_for(state_bytes(N, state) // 2), layout)
    return microseconds([lambda i=i: getattr(layer, op)(i) for i in range(layer.sets)])


# ---------------------------------------------------------------------------------------- sweeps


@contextlib.contextmanager
def replaced(owner: Any, name: Any, value: Any) -> Iterator[None]:
    """An attribute of configs, or a row of one of its tables, for the time of a measurement."""
    table = isinstance(owner, dict)
    saved = owner[name] if table else getattr(owner, name)
    put = owner.__setitem__ if table else lambda n, v: setattr(owner, n, v)
    put(name, value)
    forget()
    try:
        yield
    finally:
        put(name, saved)
        forget()


def brief(config: Config | None) -> str:
    if config is None:
        return "now"
    fields = {n: v for n, v in config._asdict().items() if v != Config._field_defaults.get(n)}
    return " ".join(f"{name}={value}" for name, value in fields.items())


def decode_rows(op: str, sizes: tuple[int, ...], T: int, layout: str = "vk") -> Iterator[str]:
    pieces = {
        FP32: ((2, 8, 32), (2, 16, 32), (2, 8, 128), (1, 8, 128)),
        BF16: ((2, 16, 32), (1, 8, 64), (1, 16, 64), (2, 16, 64), (1, 16, 128)),
    }
    if layout == "kv":
        pieces = {
            FP32: ((1, 16, 16), (2, 32, 16), (2, 32, 32), (4, 32, 32)),
            BF16: ((1, 32, 16), (2, 32, 16), (2, 32, 32), (4, 64, 16)),
        }
    elif T > 1:
        pieces = {
            FP32: ((2, 32, 32), (2, 64, 32)),
            BF16: ((2, 64, 32), (1, 16, 64), (1, 32, 64), (2, 64, 64), (1, 32, 128)),
        }
    hints = [("", "")]
    if T == 1:
        hints += [(STREAM, STREAM), (KEEP, ""), (KEEP, STREAM)]
    for state in (FP32, BF16):
        found: list[Config | None] = [None]
        for warps, rows, keys in pieces[state]:
            config = Config(num_warps=warps, BLOCK_V=rows, PIECE_K=keys)
            found += [config._replace(LOAD=load, STORE=store) for load, store in hints]
        for config in found:
            with contextlib.ExitStack() as stack:
                if config is not None:
                    key = layout, state.itemsize
                    for table in (configs.DECODE, configs.DRAFT):
                        if key in table:
                            stack.enter_context(replaced(table, key, (Row(ANY, config),)))
                    stack.enter_context(replaced(configs, "COMMIT", {}))
                times = {N: time_layer(op, N, state, T, layout) for N in sizes}
            rates = (
                f"{N}: {t:.2f} ({state_bytes(N, state) / t / 1e6:.2f})" for N, t in times.items()
            )
            yield f"{op} T={T} {layout} {SHORT[state]} {brief(config):52} " + "  ".join(rates)


def step_rows(sizes: tuple[int, ...], layout: str = "vk") -> Iterator[str]:
    for state in (FP32, BF16):
        key = layout, state.itemsize
        PIECE_K = configs.STEP[key].PIECE_K
        choices: list[Config | None] = [None]
        choices += [
            Config(num_warps=w, PIECE_K=PIECE_K, maxnreg=m, fp_fusion=True)
            for w, m in ((4, None), (8, None), (8, 128))
        ]
        for config in choices:
            chosen = config or configs.STEP[key]
            with replaced(configs.STEP, key, chosen):
                times = {N: time_layer("step", N, state, layout=layout) for N in sizes}
            text = "  ".join(f"{N}: {t:.2f}" for N, t in times.items())
            yield f"step {layout} {SHORT[state]} {brief(config)} {text}"


def conv_inputs(T: int, sets: int) -> list[dict[str, Any]]:
    gen = torch.Generator("cuda").manual_seed(T)

    def randn(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        return torch.randn(*shape, generator=gen, device="cuda", dtype=dtype)

    pool = randn(sets, 3, D).transpose(1, 2)
    bounds = torch.tensor([0, T], dtype=torch.int32)
    known = torch.ones(1, dtype=torch.bool, device="cuda")
    fixed = {"weight": randn(D, 4), "A_log": randn(HV, dtype=FP32), "dt_bias": randn(HV)}
    fixed |= {"num_k_heads": HK, "num_v_heads": HV, "state": pool, "has_state": known}
    fixed |= {"cu_seqlens": bounds.cuda(), "cu_seqlens_cpu": bounds}
    found = []
    for i in range(sets):
        ba = randn(T, 2 * HV)
        slots = torch.tensor([i], dtype=torch.int32, device="cuda")
        one = {"x": randn(T, D), "a": ba[:, HV:], "b": ba[:, :HV], "slots": slots}
        found.append(fixed | one)
    return found


def time_conv_qkv(T: int) -> float:
    one = conv_inputs(min(T, 200), 1)[0]
    state = one["state"].clone()
    mine = sluice.conv_qkv(**one, backend="triton")
    exact = sluice.conv_qkv(**(one | {"state": state}), backend="reference")
    for x, y in zip(mine, exact, strict=True):
        matches(x, y)
    if not torch.equal(one["state"], state):
        raise AssertionError("conv state differs")
    calls = conv_inputs(T, sets_for(4 * T * D, least=4))
    return microseconds([lambda kw=kw: sluice.conv_qkv(**kw, backend="triton") for kw in calls])


def conv_rows(sizes: tuple[int, ...]) -> Iterator[str]:
    cuts = ((4, 16), (4, 32), (8, 32), (4, 64), (8, 64), (8, 128))
    choices: list[Config | None] = [None]
    for fused in (False, True):
        now = configs.CONV_QKV[-1].config
        choices += [now._replace(BLOCK_T=t, UNIT_T=unit, fp_fusion=fused) for t, unit in cuts]
    for config in choices:
        rows = configs.CONV_QKV if config is None else (Row(ANY, config),)
        with replaced(configs, "CONV_QKV", rows):
            times = {T: time_conv_qkv(T) for T in sizes}
        moved = 4 * D + 12 * HV  # x read; q, k, v written; a and b read, g and beta written
        rates = (f"{T}: {t:.1f} ({moved * T / t / 1e6:.2f})" for T, t in times.items())
        yield f"conv_qkv {brief(config):32} " + "  ".join(rates)


def key_inputs(T: int, sets: int) -> list[dict[str, Any]]:
    """Calls of prefill with one decay per key, raw gates and norm, as in a KDA layer."""
    gen = torch.Generator("cuda").manual_seed(T)

    def randn(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        return torch.randn(*shape, generator=gen, device="cuda", dtype=dtype)

    rates = {"A_log": randn(HV, dtype=FP32), "dt_bias": randn(HV, K, dtype=FP32)}
    fixed = {**rates, "normalize_qk": True}
    return [
        {
            "q": randn(1, T, HV, K), "k": randn(1, T, HV, K), "v": randn(1, T, HV, V),
            "g": randn(1, T, HV, K), "beta": randn(1, T, HV),
            "state": randn(1, HV, V, K, dtype=FP32).mul_(0.3), **fixed,
        }
        for _ in range(sets)
    ]  # fmt: skip


def time_key(T: int) -> float:
    (one,) = key_inputs(min(T, 200), 1)
    state = one["state"].clone()
    mine = sluice.prefill(**one, backend="triton")[0]
    matches(mine, sluice.prefill(**(one | {"state": state}), backend="reference")[0])
    matches(one["state"], state)
    calls = key_inputs(T, sets_for(5 * T * HV * K * 2))
    return microseconds([lambda kw=kw: sluice.prefill(**kw, backend="triton") for kw in calls])


def key_rows(sizes: tuple[int, ...]) -> Iterator[str]:
    major = torch.cuda.get_device_capability()[0]
    for way, chosen in (("whole", (major,)), ("pieces", ())):
        with replaced(configs, "KEY_WHOLE", chosen):
            times = {T: time_key(T) for T in sizes}
        now = "now" if (major in configs.KEY_WHOLE) == bool(chosen) else ""
        yield f"prefill_key {way} {now:4} " + "  ".join(f"{T}: {t:.1f}" for T, t in times.items())


@triton.jit
def copy_kernel(
    state_ptr,
    slots_ptr,
    stride_state_p,
    HEADS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PIECE_K: tl.constexpr,
):
    begin()
    BLOCKS: tl.constexpr = 128 // BLOCK_V
    pid = tl.program_id(0)
    slot = tl.load(slots_ptr + pid // (BLOCKS * HEADS)).to(tl.int64)
    block = pid % (BLOCKS * HEADS)
    state_ptr += slot * stride_state_p + block * (BLOCK_V * 128)
    offs = tl.arange(0, BLOCK_V)[:, None] * 128 + tl.arange(0, PIECE_K)[None, :]
    for j in tl.static_range(128 // PIECE_K):
        at = state_ptr + offs + j * PIECE_K
        tl.store(at, tl.load(at))


def copy_rows(sizes: tuple[int, ...]) -> Iterator[str]:
    """What memory allows: a copy, and each state read and written back in decode's own pattern."""
    for total in (2**28, 2**29):
        pairs = [torch.empty(2, total // 2, dtype=torch.uint8, device="cuda") for _ in range(3)]
        t = microseconds([lambda p=p: p[1].copy_(p[0]) for p in pairs])
        yield f"copy of {total >> 20} MiB {t:.1f} ({total / t / 1e6:.2f})"
    for state in (FP32, BF16):
        for warps, rows, keys in ((1, 8, 128), (1, 16, 128), (2, 8, 32), (2, 16, 32), (2, 8, 128)):
            times = {}
            for N in sizes:
                layer = Layer(N, 1, state, sets_for(state_bytes(N, state) // 2))
                shape = {"HEADS": HV, "BLOCK_V": rows, "PIECE_K": keys, "num_warps": warps}
                arguments = (layer.state, layer.state.stride(0))
                grid = (N * HV * (V // rows),)
                times[N] = microseconds(
                    [
                        lambda s=s, a=arguments, g=grid, shape=shape: copy_kernel[g](
                            a[0], s, a[1], **shape, launch_pdl=True
                        )
                        for s in layer.slots
                    ]
                )
            rates = (
                f"{N}: {t:.2f} ({state_bytes(N, state) / t / 1e6:.2f})" for N, t in times.items()
            )
            shape = f"BLOCK_V={rows} PIECE_K={keys}"
            yield f"in place {SHORT[state]} warps={warps} {shape}  " + "  ".join(rates)


def check_rows(part: str) -> Iterator[str]:
    """The suite's named cases on this GPU, in every dtype: no pytest is needed for it."""
    from sluice.testing import cases

    i, n = map(int, part.split("/"))
    ops = ("decode", "verify", "causal_conv1d", "conv_qkv", "rms_norm_gated", "step")
    passed = failed = 0
    for case, dtype in cases.pairs(*ops)[i::n]:
        try:
            inputs = case.inputs(dtype, "cuda")
            expected = case.expected(inputs)
            case.check(case.run(sluice, inputs, backend="triton"), expected)
            passed += 1
        except Exception as error:  # one failure must not hide the next
            failed += 1
            yield f"FAILED {cases.label(case, dtype)}: {type(error).__name__} {str(error)[:200]}"
    yield f"part {part}: {passed} passed, {failed} failed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = ("copy", "decode", "verify", "step", "conv_qkv", "decode_kv", "verify_kv", "step_kv")
    parser.add_argument("ops", nargs="*", default=names)
    parser.add_argument("--quick", action="store_true", help="fewer sizes")
    parser.add_argument("--part", default="0/1", help="of check: which part of how many")
    options = parser.parse_args()
    few = options.quick
    large = (1, 8, 128) if few else LARGE
    drafts = (1, 64, 256) if few else (1, 16, 64, 256)
    steps = (1, 16, 64, 256) if few else (1, 4, 16, 64, 256)
    sweeps = {
        "check": lambda: check_rows(options.part),
        "copy": lambda: copy_rows((1, 128) if few else (1, 8, 64, 128, 256)),
        "decode": lambda: decode_rows("decode", large, 1),
        "decode_kv": lambda: decode_rows("decode", large, 1, "kv"),
        "verify": lambda: decode_rows("verify", drafts, 4),
        "verify_kv": lambda: decode_rows("verify", drafts, 4, "kv"),
        "step": lambda: step_rows(steps),
        "step_kv": lambda: step_rows(steps, "kv"),
        "prefill_key": lambda: key_rows((2048,) if few else (512, 2048, 8192)),
        "conv_qkv": lambda: conv_rows(
            (4096, 8192, 16384) if few else (512, 2048, 4096, 8192, 16384)
        ),
    }
    versions = f"torch {torch.__version__}, triton {triton.__version__}"
    print(f"{torch.cuda.get_device_name()}, {versions}, sluice {sluice.__version__}", flush=True)
    for name in options.ops or names:
        for line in sweeps[name]():
            print(line, flush=True)


if __name__ == "__main__":
    main()
