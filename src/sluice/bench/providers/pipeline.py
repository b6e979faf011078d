"""A whole layer over prompts with a peer's recurrence, to compare with sluice's ``layer``.

FLA has every part of a layer; FlashQLA and FlashInfer have only the recurrence. Their users take
the convolution, l2 norm, gates and gated norm from FLA, and so does this module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from sluice.bench.providers.base import Call, Job, RefusalError, heads_of, load
from sluice.testing.oracle import split_projections

ROWS = "pool rows gathered"
FRESH = "the state comes back in a fresh tensor"
WIDE = "window of W columns"

FRESH_32 = "the state comes back in a fresh tensor of float32"

Rule = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def fresh(job: Job) -> str:
    """The note for peers that read any state and return a new one in float32."""
    return FRESH if job.case.state_dtype == torch.float32 else FRESH_32


def convolution(job: Job) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """FLA's convolution of whole prompts: ``(x, weight)`` to y and the window of W columns."""
    conv = load("fla.modules.causal_conv1d").causal_conv1d
    window = pad(job.rows("conv_state"), (1, 0))

    def roll(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return conv(
            x, weight=weight, initial_state=window, output_final_state=True, activation="silu"
        )

    return roll


def whole(
    job: Job,
    roll: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    rule: Rule,
    *,
    after: Callable[[Tensor], Tensor] = lambda state: state,
    notes: tuple[str, ...] = (ROWS, FRESH),
    mutable: tuple[Tensor, ...] = (),
    detail: str = "",
) -> Call:
    """Convolution, ``rule(q, k, v, a, b)``, gated norm, one after the other.

    ``rule`` gets q, k and v as views of the convolution's output, and raw gates; it returns its
    output and the state. ``after`` extracts the state's rows from the returned state.
    """
    norm = load("fla.modules.norm.fused_norm_gate").rms_norm_gated
    c, i = job.case, job.inputs
    qkv, z, b, a = split_projections(
        i["qkvz"], i["ba"], order=c.order, Hk=c.Hk, Hv=c.Hv, K=c.K, V=c.V
    )
    if c.flat:
        qkv, z, b, a = (x[:, None] for x in (qkv, z, b, a))

    def run() -> tuple[Tensor, Tensor, Tensor]:
        mixed, rolled = roll(qkv, i["conv_weight"])
        o, state = rule(*heads_of(mixed, c), a, b)
        y = norm(o, z, i["norm_weight"], None, activation=c.gate_activation, eps=1e-6)
        return y, state, rolled

    def outputs(result: tuple[Tensor, Tensor, Tensor]) -> dict[str, Tensor]:
        y, state, rolled = result
        y = y.flatten(-2)
        y = y[:, 0] if c.flat else y
        return {"y": y, "state": after(state), "conv_state": rolled[..., -c.window :].clone()}

    order = ("projections split",) if c.order == "interleaved" else ()
    return Call(run, outputs, (*notes, WIDE, *order), mutable=mutable, detail=detail)


def gates(i: dict[str, Any]) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """FLA's kernel for the decay, a sigmoid for beta: ``(a, b)`` to g and beta in float32."""
    gate = load("fla.ops.gated_delta_rule.gate").fused_gdn_gate

    def make(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return gate(a, i["A_log"], i["dt_bias"]), b.float().sigmoid()

    return make


def borrowed() -> None:
    """Refuse if FLA cannot be imported."""
    try:
        load("fla.modules.causal_conv1d")
    except Exception as error:  # a broken install raises anything
        text = f"has the recurrence only, and FLA for the rest is not here: {error}"
        raise RefusalError(text) from None


def bounds(job: Job, dtype: torch.dtype) -> Tensor:
    """Borders of a batch of equal prompts, packed; made once, since peers cache by identity."""
    c = job.case

    def make() -> Tensor:
        return torch.arange(c.batch + 1, device=job.device, dtype=dtype) * c.tokens

    made: Tensor = job.once("bounds", make)
    return made
