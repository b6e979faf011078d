"""Prefill long prompts that are divided over ranks, then decode on one rank.

    torchrun --standalone --nproc-per-node 4 examples/context_parallel.py
    torchrun --standalone --nproc-per-node 8 examples/context_parallel.py --tokens 1048576

Every rank holds a part of the input tokens of one gated delta layer. Two exchanges join the parts:
the conv inputs before each border, and the exact transition of each part. The program uses NCCL
where there is a GPU, and gloo on a CPU.
"""
# ruff: noqa: T201

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist

import sluice
from sluice.distributed import Ranks, Split, forward
from sluice.layers import GatedDeltaNet, QwenShape


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096, help="of all prompts together")
    parser.add_argument("--backend", help="the sluice backend to use (default: the fastest)")
    options = parser.parse_args()
    if not dist.is_torchelastic_launched():
        parser.error(
            "start it with torchrun --standalone --nproc-per-node 4 examples/context_parallel.py"
        )

    gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if gpu else "gloo")
    device = torch.device("cpu")
    if gpu:
        device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
        torch.cuda.set_device(device)
    ranks = Ranks(timeout=60)

    torch.manual_seed(0)  # the same layer and the same prompts on every rank
    shape = QwenShape("example", 256, 2, 8, 1, (0,))
    dtype = torch.bfloat16 if gpu else torch.float32
    layer = GatedDeltaNet(shape, device=device, dtype=dtype).requires_grad_(False)
    layer.A_log.fill_(-6.0)  # weak decay: heads remember the whole prompt
    # three packed prompts; the second one is long and lies on all ranks
    T = options.tokens
    bounds = [0, T // 16, T - T // 8, T]
    split = Split.even(T, ranks.size, bounds)
    part = split.part(ranks.rank)
    x = torch.randn(T, 256, dtype=dtype).to(device)

    # each rank has a pool; rank 0 will decode, so it gets the final states
    conv_state, state = layer.zero_states(3)
    with torch.inference_mode(), sluice.use_backend(options.backend):
        y = forward(
            layer,
            x[part.start : part.stop],
            ranks=ranks,
            split=split,
            conv_state=conv_state,
            state=state,
            deliver=0,
        )
        # the same on one device, to compare
        whole_states = layer.zero_states(3)
        cu_seqlens = torch.tensor(bounds, device=device)
        whole = layer(x, conv_state=whole_states[0], state=whole_states[1], cu_seqlens=cu_seqlens)
        print(
            f"rank {ranks.rank}: tokens {part.start} to {part.stop}, sequences {part.first} to "
            f"{part.last - 1}, {part.incoming} tokens of one that came in; "
            f"against one device: {error(y, whole[part.start : part.stop]):.1e}"
        )
        if ranks.rank == 0:
            token = torch.randn(3, 256, dtype=dtype).to(device)
            after = layer(token, conv_state=conv_state, state=state)
            expected = layer(token, conv_state=whole_states[0], state=whole_states[1])
            print(f"decode after it, against one device: {error(after, expected):.1e}")
            for name, cost in ranks.costs().items():
                print(
                    f"{name}: {cost.calls} exchanges, {cost.sent:,} bytes sent, {cost.received:,} "
                    f"received, {cost.seconds * 1e3:.2f} ms"
                )
    dist.barrier()
    dist.destroy_process_group()


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The relative error over all elements."""
    difference = (actual.double() - expected.double()).norm()
    return (difference / expected.double().norm()).item()


if __name__ == "__main__":
    main()
