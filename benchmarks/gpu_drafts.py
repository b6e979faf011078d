"""Draft tokens on a GPU, as engines keep them: graph replays, all ways in one run.

    PYTHONPATH=src python benchmarks/gpu_drafts.py [--layers 36] [--rows 64] [--tokens 4]

First, the state after each token: one ``decode`` with a write slot for each token, against one
``decode`` for each token, and FlashInfer's kernel that does the same, where it is installed.
Second, all layers of a step: ``verify`` of each layer into buffers and one ``commit_layers``,
against one ``decode`` of the same tokens for each layer, and against one ``commit`` for each layer.
"""
# ruff: noqa: T201

from __future__ import annotations

import argparse
import importlib
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import sluice
from sluice.bench.machine import conditions

HK, HV, K, W = 16, 32, 128, 4
D = (2 * HK + HV) * K
ROUNDS, REPLAYS = 9, 10


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def tokens(N: int, T: int) -> dict[str, Any]:
    """Raw gates and keys of any length, as a layer has them after its convolution."""
    return {
        "q": randn(N, T, HK, K),
        "k": randn(N, T, HK, K),
        "v": randn(N, T, HV, K),
        "g": randn(N, T, HV),
        "beta": randn(N, T, HV),
        "A_log": torch.zeros(HV, device="cuda"),
        "dt_bias": torch.zeros(HV, device="cuda"),
        "normalize_qk": True,
    }


def graph_of(function: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    graph.kept = function  # type: ignore[attr-defined]
    return graph


def microseconds(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1000 / REPLAYS


def measured(ways: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Medians, the ways in turn."""
    graphs = {name: graph_of(function) for name, function in ways.items()}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            times[name].append(microseconds(graph))
    return {name: statistics.median(t) for name, t in times.items()}


def table(title: str, found: dict[str, float], base: str) -> None:
    print(f"\n{title}")
    for name, t in found.items():
        print(f"  {name:<58} {t:10.1f} us   {t / found[base]:.3f} x", flush=True)


def each_token(N: int, T: int, dtype: torch.dtype) -> None:
    """The state after each token."""
    call = tokens(N, T)
    pool = randn(N * (T + 1), HV, K, K, dtype=torch.float32).mul_(0.1).to(dtype)
    slots = torch.arange(N, device="cuda", dtype=torch.int32)
    writes = N + torch.arange(N * T, device="cuda", dtype=torch.int32).view(N, T)
    out = torch.empty_like(call["v"])
    ready = {"A_log", "dt_bias", "normalize_qk"}

    def one_by_one() -> None:
        read = slots
        for t in range(T):
            now = {n: x if n in ready else x[:, t : t + 1] for n, x in call.items()}
            to = writes[:, t].contiguous()
            sluice.decode(**now, state=pool, slots=read, write_slots=to, out=out[:, t : t + 1])
            read = to

    ways: dict[str, Callable[[], Any]] = {
        "decode, one state for all tokens": lambda: sluice.decode(
            **call, state=pool, slots=slots, write_slots=writes[:, 0].contiguous(), out=out
        ),
        "decode, a state for each token": lambda: sluice.decode(
            **call, state=pool, slots=slots, write_slots=writes, out=out
        ),
        "one decode for each token": one_by_one,
    }
    theirs = flashinfer(call, pool, slots, out)
    if theirs is not None:
        ways["FlashInfer's MTP kernel, states to a buffer"] = theirs
    title = f"the state after each token, {N} x {T}, heads {HK}/{HV}, {dtype} states"
    table(title, measured(ways), "decode, a state for each token")


def flashinfer(
    call: dict[str, Any], pool: Tensor, slots: Tensor, out: Tensor
) -> Callable[[], Any] | None:
    """FlashInfer's kernel on the same tensors; None, and why, where it does not serve them."""
    kept = pool.new_empty(*call["q"].shape[:2], *pool.shape[1:])
    arguments = [call[n] for n in ("A_log", "g", "dt_bias", "beta")]

    def run() -> Any:
        mtp = importlib.import_module("flashinfer.gdn_decode").gated_delta_rule_mtp
        return mtp(
            call["q"], call["k"], call["v"], pool, slots, *arguments, output=out,
            intermediate_states_buffer=kept, disable_state_update=True, use_qk_l2norm=True,
        )  # fmt: skip

    try:
        run()
    except Exception as refusal:
        print(f"FlashInfer's MTP kernel: {type(refusal).__name__}: {refusal}")
        return None
    return run


def all_layers(N: int, T: int, layers: int, dtype: torch.dtype) -> None:
    """A step of all layers."""
    calls = [tokens(N, T) for _ in range(layers)]
    state = torch.empty(layers, N, HV, K, K, device="cuda", dtype=dtype).normal_(0, 0.1)
    conv, x = randn(layers, N, D, W - 1), randn(layers, N, T, D)
    slots = torch.arange(N, device="cuda", dtype=torch.int32)
    counts = torch.arange(N, device="cuda", dtype=torch.int32) % T + 1
    every = torch.full_like(counts, T)
    lead, wide = (layers, N, T), {"device": "cuda", "dtype": torch.float32}
    buffers = sluice.DraftBuffers(
        torch.zeros(*lead, HK, K, **wide), torch.zeros(*lead, HV, K, **wide),
        torch.zeros(*lead, HV, **wide), torch.zeros_like(x),
    )  # fmt: skip
    outs = torch.empty(layers, N, T, HV, K, device="cuda", dtype=torch.bfloat16)
    own = [{"state": state[i], "slots": slots, "out": outs[i]} for i in range(layers)]
    window = [{"conv_inputs": x[i], "conv_state": conv[i]} for i in range(layers)]

    def decode() -> None:
        for call, rows in zip(calls, own, strict=True):
            sluice.decode(**call, **rows)

    def verify(with_window: bool) -> None:
        kept = buffers if with_window else buffers._replace(x=None)
        for i, (call, rows) in enumerate(zip(calls, own, strict=True)):
            more = window[i] if with_window else {}
            sluice.verify(**call, **rows, **more, buffers=kept.layer(i))

    def commit(accepted: Tensor, with_window: bool) -> None:
        kept = buffers if with_window else buffers._replace(x=None)
        more = {"conv_state": conv} if with_window else {}
        sluice.commit_layers(kept, accepted, state=state, slots=slots, **more)

    def both(accepted: Tensor, with_window: bool) -> None:
        verify(with_window)
        commit(accepted, with_window)

    def by_layer() -> None:
        for i, (call, rows) in enumerate(zip(calls, own, strict=True)):
            _, draft = sluice.verify(**call, **rows, **window[i])
            sluice.commit(draft, counts)

    some = f"1 to {T} accepted"
    ways: dict[str, Callable[[], Any]] = {
        "decode of each layer": decode,
        "verify of each layer into buffers": lambda: verify(False),
        f"commit_layers, {some}": lambda: commit(counts, False),
        f"verify + commit_layers, {some}": lambda: both(counts, False),
        f"verify + commit_layers, all {T} accepted": lambda: both(every, False),
        f"verify + commit_layers with windows, {some}": lambda: both(counts, True),
        f"verify + commit of each layer with windows, {some}": by_layer,
    }
    title = f"a step of {layers} layers, {N} x {T}, heads {HK}/{HV}, {dtype} states"
    table(title, measured(ways), "decode of each layer")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=4)
    args = parser.parse_args()
    print(conditions(torch.device("cuda"), 1))
    for dtype in (torch.float32, torch.bfloat16):
        each_token(args.rows, args.tokens, dtype)
        all_layers(args.rows, args.tokens, args.layers, dtype)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
