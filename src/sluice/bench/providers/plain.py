"""Plain torch: what one writes in a dozen lines, in place, with no library but torch itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import conv1d, rms_norm, silu, softplus

from sluice.bench.providers.base import (
    Call,
    Job,
    Provider,
    RefusalError,
    as_batch,
    equal_lengths,
    heads_of,
    raw_gates,
)

ROWS = "pool rows gathered"
NORM_EPS = 1e-6


class Torch(Provider):
    name = "torch"
    title = "plain torch"
    package = "torch"
    install = "pip install torch"

    def _prefill(self, job: Job) -> Call:
        raise RefusalError("token by token; its chunked forms are sluice:chunked and transformers")

    def _decode(self, job: Job) -> Call:
        c, i, state = job.case, job.inputs, job.rows()
        if state.dtype != torch.float32:
            raise RefusalError("matrix products want one dtype: a float32 state")
        S = state.flatten(0, 1)  # [N·Hv, V, K]

        def run() -> Tensor:
            q, k, v, g, beta = _token(i, c, 0)
            return _update(S, q, k, v, g, beta).reshape(c.N, 1, c.Hv, c.V).to(i["v"].dtype)

        return Call(run, lambda o: {"o": o, "state": state.clone()}, (ROWS,), mutable=(state,))

    def _verify(self, job: Job) -> Call:
        c, i, state = job.case, job.inputs, job.rows()
        if state.dtype != torch.float32:
            raise RefusalError("matrix products want one dtype: a float32 state")
        kept = state.new_empty(c.tokens, *state.shape)  # the state after each draft token
        last = i["num_accepted"].long() - 1
        row = torch.arange(c.N, device=job.device)

        def run() -> Tensor:
            out, S = [], state
            for t in range(c.tokens):
                kept[t].copy_(S)
                S = kept[t]
                o = _update(S.flatten(0, 1), *_token(i, c, t))
                out.append(o.reshape(c.N, c.Hv, c.V))
            state.copy_(kept[last, row])
            return torch.stack(out, dim=1).to(i["v"].dtype)

        return Call(
            run,
            lambda o: {"o": o, "state": state.clone()},
            (ROWS, "keeps the state after every token"),
            mutable=(state,),
        )

    def _causal_conv1d(self, job: Job) -> Call:
        roll, window = _rolls(job)

        def outputs(y: Tensor) -> dict[str, Tensor]:
            return {"y": y.transpose(1, 2).reshape(job.inputs["x"].shape), "state": window.clone()}

        return Call(roll, outputs, (ROWS, "x as [B, D, T]"), mutable=(window,))

    def _conv_qkv(self, job: Job) -> Call:
        roll, window = _rolls(job)
        c, i = job.case, job.inputs

        def run() -> tuple[Tensor, ...]:
            q, k, v = heads_of(roll().transpose(1, 2), c)
            return _unit(q).to(v.dtype), _unit(k).to(v.dtype), v, *raw_gates(i)

        def outputs(result: tuple[Tensor, ...]) -> dict[str, Tensor]:
            shape = i["x"].shape[:2]
            found = dict(zip(("q", "k", "v", "g", "beta"), result, strict=True))
            named = {name: x.reshape(*shape, *x.shape[2:]) for name, x in found.items()}
            return {**named, "state": window.clone()}

        return Call(run, outputs, (ROWS, "x as [B, D, T]"), mutable=(window,))

    def _rms_norm_gated(self, job: Job) -> Call:
        i, c = job.inputs, job.case
        gate = silu if c.gate_activation == "silu" else torch.sigmoid
        x, z, weight = i["x"], i["z"], i["weight"].float()

        def run() -> Tensor:
            normed = rms_norm(x.float(), (c.V,), weight, NORM_EPS)
            return (normed * gate(z.float())).to(x.dtype)

        return Call(run, lambda y: {"y": y})


def _rolls(job: Job) -> tuple[Callable[[], Tensor], Tensor]:
    """Something that convolves, [N, D, T], and the window it updates in place."""
    i, c = job.inputs, job.case
    same = (c.batch, c.tokens) if c.lengths is None else equal_lengths(job)
    if same is None:
        raise RefusalError("has no packed prompts")
    x = as_batch(i["x"], *same).transpose(1, 2).contiguous()
    window, weight = job.rows(), i["weight"].unsqueeze(1)

    def run() -> Tensor:
        longer = torch.cat([window, x], dim=-1)
        window.copy_(longer[..., -window.shape[-1] :])
        return silu(conv1d(longer, weight, groups=weight.shape[0]))

    return run, window


def _unit(x: Tensor) -> Tensor:
    x = x.float()
    return x * (x.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt()


def _token(i: dict[str, Any], c: Any, t: int) -> tuple[Tensor, ...]:
    """q and k normalised and given to each value head, v, and the gates of token t: [N·Hv, ..]."""
    r = c.Hv // c.Hk

    def heads(x: Tensor) -> Tensor:
        return _unit(x[:, t]).repeat_interleave(r, dim=1).reshape(-1, c.K, 1)

    g = -i["A_log"].exp() * softplus(i["g"][:, t].float() + i["dt_bias"])
    beta = i["beta"][:, t].float().sigmoid()
    v = i["v"][:, t].float().reshape(-1, c.V, 1)
    return heads(i["q"]) * c.K**-0.5, heads(i["k"]), v, g.reshape(-1, 1, 1), beta.reshape(-1, 1, 1)


def _update(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """One token into S [.., V, K], in place; its output [.., V, 1]."""
    S.mul_(g.exp())
    d = (v - torch.bmm(S, k)).mul_(beta)
    S.baddbmm_(d, k.transpose(1, 2))
    return torch.bmm(S, q)


def provider() -> Torch:
    return Torch()
