"""What one episode runs: the sizes and options of a model, its weights, and its pool."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sluice.state_pool import PoolGeometry, StatePool

FLOAT32, BFLOAT16, FLOAT16 = torch.float32, torch.bfloat16, torch.float16
LAYERS = 2
DTYPES = (FLOAT32, FLOAT32, FLOAT32, BFLOAT16, FLOAT16)


@dataclass(frozen=True)
class Plan:
    """Sizes and options of an episode, all drawn from its seed."""

    seed: int
    device: str  # of the tensors
    gpu: bool  # kernels of a GPU, which may be emulated
    Hk: int
    Hv: int
    K: int
    V: int
    W: int
    columns: int
    slots: int
    dtype: torch.dtype
    state_dtype: torch.dtype
    conv_dtype: torch.dtype
    state_layout: Any
    conv_order: Any
    reserve: bool
    paged: bool
    bias: bool
    neg_eigval: bool
    activation: Any
    gate: Any
    index: torch.dtype

    @property
    def D(self) -> int:  # noqa: N802
        return 2 * self.Hk * self.K + self.Hv * self.V

    @property
    def carried(self) -> bool:
        """Whether exact states run on by themselves; else they begin anew from the pool's rows.

        The contract bounds the error of many calls for float32 alone, of one call for the rest.
        """
        return self.dtype == FLOAT32 and self.state_dtype == FLOAT32

    @property
    def watched(self) -> bool:
        """Whether values are looked at: always on a CPU, on a GPU in every second episode."""
        return self.device == "cpu" or self.seed % 2 == 0

    def __str__(self) -> str:
        return (
            f"Hk={self.Hk} Hv={self.Hv} K={self.K} V={self.V} W={self.W} L={self.columns} "
            f"slots={self.slots} {self.dtype} state={self.state_dtype} {self.state_layout} "
            f"conv={self.conv_dtype} {self.conv_order} reserve={self.reserve} paged={self.paged}"
        )


GPU_PLANS = 16
"""On a GPU there are only so many draws of sizes and options, because each compiles about fifty
kernels. Weights, values and actions are still the episode's own."""


def emulated(device: str) -> bool:
    """Whether a device is the name of a GPU that is emulated, such as sm_90."""
    return device.startswith("sm_")


def plan(seed: int, device: str = "cpu") -> Plan:
    """The plan of an episode."""
    gpu = device != "cpu"
    dice = random.Random(seed % GPU_PLANS if gpu else seed)
    Hk = dice.choice((1, 1, 2))
    K, V = dice.choice(((16, 16), (32, 32), (32, 16), (16, 24), (40, 33)))
    if gpu and dice.random() < 0.3:
        K = V = 128  # the width of models, which some kernels are made for
    dtype = dice.choice(DTYPES)
    W = dice.choice((2, 3, 4, 4))
    return Plan(
        seed=seed,
        device="cpu" if emulated(device) else device,
        gpu=gpu,
        Hk=Hk,
        Hv=Hk * dice.choice((1, 2, 2, 3)),
        K=K,
        V=V,
        W=W,
        columns=W - 1 + dice.choice((0, 0, 2)),
        slots=dice.choice((6, 9, 12)),
        dtype=dtype,
        state_dtype=dice.choice(DTYPES),
        conv_dtype=dice.choice((dtype, dtype, FLOAT32)),
        state_layout=dice.choice(("vk", "kv")),
        conv_order=dice.choice(("dl", "ld")),
        reserve=dice.random() < 0.4,
        paged=dice.random() < 0.25,
        bias=dice.random() < 0.5,
        neg_eigval=dice.random() < 0.3,
        activation=dice.choice(("silu", "silu", None)),
        gate=dice.choice(("silu", "sigmoid")),
        index=dice.choice((torch.int32, torch.int64)),
    )


@dataclass
class Weights:
    """Weights of all layers, stacked; ``layer(i)`` on the device, ``exact`` in float64."""

    conv: Tensor
    bias: Tensor | None
    A_log: Tensor
    dt_bias: Tensor
    norm: Tensor
    on: list[dict[str, Any]] = field(default_factory=list)


def weights(plan: Plan) -> Weights:
    """Drawn from the episode's seed; decays from hardly any to strong."""
    gen = torch.Generator().manual_seed(plan.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(LAYERS, *shape, generator=gen).to(plan.dtype)

    made = Weights(
        conv=normal(plan.D, plan.W),
        bias=normal(plan.D) if plan.bias else None,
        A_log=(normal(plan.Hv).float() * 1.5 - 1.0),
        dt_bias=normal(plan.Hv).float() - 2.0,
        norm=1.0 + 0.1 * normal(plan.V),
    )
    names = ("conv", "bias", "A_log", "dt_bias", "norm")
    for i in range(LAYERS):
        each = {name: getattr(made, name) for name in names}
        made.on.append({n: None if x is None else x[i].to(plan.device) for n, x in each.items()})
    return made


def pool(plan: Plan) -> tuple[StatePool, list[Tensor]]:
    """The pool, and the whole memory it lies in, as integers of one byte or more."""
    geometry = PoolGeometry(
        layers=LAYERS,
        num_v_heads=plan.Hv,
        conv_channels=plan.D,
        head_k_dim=plan.K,
        head_v_dim=plan.V,
        conv_columns=plan.columns,
        state_dtype=plan.state_dtype,
        conv_dtype=plan.conv_dtype,
    )
    options: dict[str, Any] = {
        "state_layout": plan.state_layout,
        "conv_order": plan.conv_order,
        "reserve_slot_0": plan.reserve,
    }
    if plan.paged:
        return _paged(plan, options)
    made = StatePool(geometry, plan.slots, device=plan.device, **options)
    return made, [_memory(made.conv), _memory(made.recurrent)]


def _paged(plan: Plan, options: dict[str, Any]) -> tuple[StatePool, list[Tensor]]:
    """Pages of bytes as engines have them: conv, then state, then a gap; one slab a layer."""
    conv_bytes = plan.D * plan.columns * plan.conv_dtype.itemsize
    state_at = -(-conv_bytes // 64) * 64
    page = state_at + plan.Hv * plan.K * plan.V * plan.state_dtype.itemsize
    page = -(-page // 64) * 64 + 64
    slabs, conv, state = [], [], []
    inner = (plan.D, plan.columns) if plan.conv_order == "dl" else (plan.columns, plan.D)
    tail = (plan.V, plan.K) if plan.state_layout == "vk" else (plan.K, plan.V)
    for _ in range(LAYERS):
        slab = torch.full((plan.slots * page,), 0xFF, dtype=torch.uint8, device=plan.device)
        size = plan.conv_dtype.itemsize
        strides = (page // size, inner[1], 1)
        conv.append(slab.view(plan.conv_dtype).as_strided((plan.slots, *inner), strides))
        size = plan.state_dtype.itemsize
        strides_s = (page // size, plan.K * plan.V, tail[1], 1)
        shape = (plan.slots, plan.Hv, *tail)
        typed = slab.view(plan.state_dtype)
        state.append(typed.as_strided(shape, strides_s, state_at // size))
        slabs.append(slab)
    return StatePool.from_tensors(conv, state, **options), [s.view(torch.int64) for s in slabs]


def _memory(x: Tensor) -> Tensor:
    size = x.untyped_storage().nbytes() // x.element_size()
    whole = x.as_strided((size,), (1,), 0)
    return whole.view({2: torch.int16, 4: torch.int32}[x.element_size()])
