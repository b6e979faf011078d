"""A gated delta layer with its heads divided over ranks, and its state moved to fewer of them.

    torchrun --standalone --nproc-per-node 4 examples/tensor_parallel.py

Each rank computes its own heads, and one all-reduce per layer sums the outputs. Then the state of
the first sequence moves from all ranks to half as many, bit for bit, as from prefill to decode.
"""
# ruff: noqa: T201

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import sluice
from sluice.distributed import Ranks, move, plan
from sluice.layers import GatedDeltaNet, QwenShape
from sluice.state_pool import StatePool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", help="the sluice backend to use (default: the fastest)")
    options = parser.parse_args()
    if not dist.is_torchelastic_launched():
        parser.error(
            "start it with torchrun --standalone --nproc-per-node 4 examples/tensor_parallel.py"
        )
    gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if gpu else "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank % torch.cuda.device_count()) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    mesh = init_device_mesh(device.type, (size,), mesh_dim_names=("tp",))

    torch.manual_seed(0)
    shape = QwenShape("example", 64, 4, 8, 2, (0, 1), head_k_dim=32, head_v_dim=32)
    layers = [GatedDeltaNet(shape, device=device) for _ in range(2)]
    model = torch.nn.Sequential(*layers).requires_grad_(False)
    x = torch.randn(3, 100, 64).to(device)
    with torch.inference_mode(), sluice.use_backend(options.backend):
        expected = model(x)
        parallelize_module(model, mesh["tp"], plan(model))

        local = model[0].shape  # of this rank's heads
        pool = StatePool.for_model(
            local, slots=3, conv_dtype=torch.float32, tag="example", device=device
        )
        mine = pool.allocate(3)
        slots, y = pool.indices(mine), x
        for index, layer in enumerate(model):
            conv_state, state = pool.layer(index)
            y = layer(y, conv_state=conv_state, state=state, slots=slots)
        worst = (y - expected).abs().max().item()
        print(f"rank {rank}: {local.num_v_heads} of 8 value heads, largest difference {worst:.1e}")

        ranks, fewer = Ranks(timeout=60), list(range(max(size // 2, 1)))
        moved = move(pool.snapshot(mine[:1]), ranks=ranks, sources=list(range(size)), targets=fewer)
        if moved is not None:
            print(f"rank {rank}: now {moved.geometry.num_v_heads} value heads of one sequence")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
