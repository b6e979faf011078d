"""Training on a CPU: forward and backward beside torch functions of transformers and FLA.

    PYTHONPATH=src python benchmarks/cpu_training.py [--tokens 512] [--dtype bfloat16] [--cpu-time]
        [--per-key | --host]

Lines: the delta rule alone (autograd through transformers' chunk function); a training step of a
gated delta layer (all gradients, no optimizer) with projections so small that conv, gates, rule and
norm are what is timed; and the same with Qwen3.5's hidden size, where projections are most of it.
16/32 heads of 128, float32. ``--per-key`` times something else: the delta rule with decay per key
(KDA), 8/8 heads, beside sluice's ``chunked`` backend and, where FLA is installed, beside autograd
through FLA's chunk function in plain torch. ``--host`` times what a call costs beside its kernels:
one token of one small head. Sides take turns in one process; a number is the median
of its turns, in milliseconds, and the second line has every turn. Gradients are compared first.
``--cpu-time`` counts the processor time of one thread in place of the clock: for a machine that
others use.
"""
# ruff: noqa: T201

from __future__ import annotations

import argparse
import copy
import inspect
import platform
import time
from collections.abc import Callable
from statistics import median

import torch
import transformers
from transformers.models.qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5 as stock

import sluice
from sluice.testing.compare import relative_error

HK, HV, WIDTH, TURNS = 16, 32, 128, 9
Times = tuple[float, float]
clock = time.perf_counter


def timed(forward: Callable[[], torch.Tensor], leaves: list[torch.Tensor], by: torch.Tensor):
    """Seconds of forward and of backward, and the gradients."""
    start = clock()
    y = forward()
    middle = clock()
    found = torch.autograd.grad(y, leaves, by)
    return (middle - start, clock() - middle), found


def line(
    name: str,
    ours: Callable,
    theirs: Callable,
    leaves: list,
    other: list,
    by: torch.Tensor,
    peer: str = "transformers",
    turns: int = TURNS,
) -> None:
    """Compare, take turns, print."""
    (_, a), (_, b) = timed(ours, leaves, by), timed(theirs, other, by)
    worst = max(relative_error(x, y) for x, y in zip(a, b, strict=True))
    times: list[list[Times]] = [[], []]
    for _ in range(turns):
        times[0].append(timed(ours, leaves, by)[0])
        times[1].append(timed(theirs, other, by)[0])
    middle = [[1e3 * median(t[i] for t in side) for i in range(2)] for side in times]
    total = [[1e3 * sum(t) for t in side] for side in times]
    both = [median(side) for side in total]
    print(
        f"{name}: sluice {middle[0][0]:.1f} + {middle[0][1]:.1f} = {both[0]:.1f} ms, {peer} "
        f"{middle[1][0]:.1f} + {middle[1][1]:.1f} = {both[1]:.1f} ms: {both[1] / both[0]:.2f} x "
        f"(gradients differ by {worst:.1e})"
    )
    every = [" ".join(f"{t:.1f}" for t in side) for side in total]
    print(f"    every turn: sluice {every[0]}; {peer} {every[1]}", flush=True)


def rule(T: int, dtype: torch.dtype) -> None:
    """The delta rule alone."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, T, h, WIDTH) for h in (HK, HK, HV))
    x = [q, k, v, -0.1 * torch.rand(1, T, HV), torch.rand(1, T, HV)]
    x = [y.to(dtype).requires_grad_() for y in x]
    chunked = inspect.unwrap(stock.torch_chunk_gated_delta_rule)

    def theirs() -> torch.Tensor:
        q, k = (y.repeat_interleave(HV // HK, dim=2) for y in x[:2])
        return chunked(q, k, x[2], g=x[3], beta=x[4], use_qk_l2norm_in_kernel=True)[0]

    def ours() -> torch.Tensor:
        return sluice.prefill(*x, normalize_qk=True)[0]

    by = torch.randn(1, T, HV, WIDTH).to(dtype)
    line(f"delta rule, {T} tokens", ours, theirs, x, x, by)


def rule_per_key(T: int, dtype: torch.dtype) -> None:
    """The delta rule with decay per key; keys and queries come normalised."""
    torch.manual_seed(0)
    H = 8
    q, k, v = torch.randn(3, 1, T, H, WIDTH)
    q, k = (torch.nn.functional.normalize(y, dim=-1) for y in (q, k))
    x = [q, k, v, -0.1 * torch.rand(1, T, H, WIDTH), torch.rand(1, T, H)]
    x = [y.to(dtype).requires_grad_() for y in x]
    by = torch.randn(1, T, H, WIDTH).to(dtype)

    def ours(backend: str | None = None) -> torch.Tensor:
        return sluice.prefill(*x, backend=backend)[0]

    peers = {"chunked": lambda: ours("chunked")}
    try:
        from fla.ops.kda.naive import naive_chunk_kda

        peers["FLA's naive_chunk_kda"] = lambda: naive_chunk_kda(*x)[0]
    except ImportError:
        print("FLA is not installed")
    for peer, theirs in peers.items():
        line(f"delta rule, decay per key, {T} tokens", ours, theirs, x, x, by, peer, 5)


def host(turns: int = 500) -> None:
    """Calls whose kernels have nothing to do, in microseconds, and torch's own multiplication."""
    x = [torch.randn(1, 1, 1, 16).requires_grad_() for _ in range(3)]
    gates = [torch.zeros(1, 1, 1).requires_grad_() for _ in range(2)]
    flat, weight = torch.randn(1, 1, 64).requires_grad_(), torch.randn(64, 4).requires_grad_()
    calls = {
        "prefill": (lambda: sluice.prefill(*x, *gates)[0], [*x, *gates]),
        "causal_conv1d": (lambda: sluice.causal_conv1d(flat, weight)[0], [flat, weight]),
        "rms_norm_gated": (lambda: sluice.rms_norm_gated(x[0], x[1], x[2][0, 0, 0]), x),
        "torch.mul": (lambda: torch.mul(x[0], x[1]), x[:2]),
    }
    for name, (call, leaves) in calls.items():
        by = torch.ones_like(call())
        times = [timed(call, leaves, by)[0] for _ in range(turns)]
        forward, backward = (1e6 * median(t[i] for t in times) for i in range(2))
        print(f"{name}: {forward:.0f} + {backward:.0f} us")


def layer(T: int, hidden: int, dtype: torch.dtype) -> None:
    """A training step of a layer of Qwen3.5's shape."""
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        hidden_size=hidden,
        linear_num_key_heads=HK,
        linear_num_value_heads=HV,
        linear_key_head_dim=WIDTH,
        linear_value_head_dim=WIDTH,
        num_hidden_layers=4,
    )
    theirs = stock.Qwen3_5GatedDeltaNet(config, 0).to(dtype)
    ours = sluice.accelerate(copy.deepcopy(theirs))
    for name in (
        "torch_chunk_gated_delta_rule",
        "causal_conv1d_fn",
        "torch_recurrent_gated_delta_rule",
    ):
        if hasattr(stock, name):  # stock's torch functions, also where FLA is installed
            setattr(stock, name, inspect.unwrap(getattr(stock, name)))
    x = torch.randn(1, T, hidden).to(dtype).requires_grad_()
    sides = [[x, *one.parameters()] for one in (ours, theirs)]
    by = torch.randn(1, T, hidden).to(dtype)
    line(f"layer, hidden size {hidden}, {T} tokens", lambda: ours(x), lambda: theirs(x), *sides, by)


def main() -> None:
    global clock
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--per-key", action="store_true")
    parser.add_argument("--host", action="store_true")
    args = parser.parse_args()
    if args.cpu_time:
        torch.set_num_threads(1)
        clock = time.process_time
    print(
        f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}, "
        f"transformers {transformers.__version__}, {args.dtype}, {clock.__name__}"
    )
    dtype = getattr(torch, args.dtype)
    if args.host:
        host()
        return
    if args.per_key:
        rule_per_key(args.tokens, dtype)
        return
    rule(args.tokens, dtype)
    layer(args.tokens, 16, dtype)
    layer(args.tokens, 2048, dtype)


if __name__ == "__main__":
    main()
