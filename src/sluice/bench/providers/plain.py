"""Plain torch: a few dozen lines, in place, with no library but torch.

Nothing here waits for the device, so on a GPU every call can be captured in a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import conv1d, rms_norm, silu

from sluice.bench.providers.base import (
    Call,
    Job,
    Provider,
    RefusalError,
    as_batch,
    equal_lengths,
    heads_of,
    raw_gates,
    spans,
)
from sluice.testing.oracle import split_projections

ROWS = "pool rows gathered"
TURNED = "x as [B, D, T]"
NORM_EPS = 1e-6
# A prompt takes four launches per token, one after the other: the longest one of the surface would
# be a graph of a hundred thousand launches.
MOST_TOKENS = 128


class Torch(Provider):
    name = "torch"
    title = "plain torch"
    package = "torch"
    install = "pip install torch"

    def _prefill(self, job: Job) -> Call:
        """All prompts at once if they are equally long, else one after the other."""
        i, state = job.inputs, _state(job)
        same = equal_lengths(job)
        parts = [slice(None)] if same else spans(job)
        _few_enough(same[1] if same else sum(job.case.sequence_lengths))
        N, T = same or (1, -1)

        def run() -> Tensor:
            out = []
            for n, part in enumerate(parts):
                S = state if same else state[n : n + 1]
                names = ("q", "k", "v", "g", "beta")
                out.append(_recurrence(S, *(as_batch(i[x][:, part], N, T) for x in names)))
            return torch.cat([o.flatten(0, 1) for o in out])[None].to(i["v"].dtype)

        return Call(run, lambda o: {"o": o, "state": state.clone()}, (ROWS,), mutable=(state,))

    def _decode(self, job: Job) -> Call:
        i, state = job.inputs, _state(job)

        def run() -> Tensor:
            return _recurrence(state, *_raw(i, i["q"], i["k"], i["v"], i["g"], i["beta"])).to(
                i["v"].dtype
            )

        return Call(run, lambda o: {"o": o, "state": state.clone()}, (ROWS,), mutable=(state,))

    def _verify(self, job: Job) -> Call:
        c, i, state = job.case, job.inputs, _state(job)
        kept = state.new_empty(c.tokens, *state.shape)  # the state after each draft token
        last = i["num_accepted"].long() - 1
        row = torch.arange(c.N, device=job.device)

        def run() -> Tensor:
            raw = _raw(i, i["q"], i["k"], i["v"], i["g"], i["beta"])
            out = []
            for t in range(c.tokens):
                kept[t].copy_(kept[t - 1] if t else state)
                out.append(_recurrence(kept[t], *(x[:, t : t + 1] for x in raw)))
            state.copy_(kept[last, row])
            return torch.cat(out, dim=1).to(i["v"].dtype)

        return Call(
            run,
            lambda o: {"o": o, "state": state.clone()},
            (ROWS, "keeps the state after every token"),
            mutable=(state,),
        )

    def _causal_conv1d(self, job: Job) -> Call:
        x, window, weight = _prompts(job)

        def outputs(y: Tensor) -> dict[str, Tensor]:
            return {"y": y.transpose(1, 2).reshape(job.inputs["x"].shape), "state": window.clone()}

        return Call(lambda: _roll(x, window, weight), outputs, (ROWS, TURNED), mutable=(window,))

    def _conv_qkv(self, job: Job) -> Call:
        x, window, weight = _prompts(job)
        c, i = job.case, job.inputs

        def run() -> tuple[Tensor, ...]:
            q, k, v = heads_of(_roll(x, window, weight).transpose(1, 2), c)
            return _unit(q).to(v.dtype), _unit(k).to(v.dtype), v, *raw_gates(i)

        def outputs(result: tuple[Tensor, ...]) -> dict[str, Tensor]:
            shape = i["x"].shape[:2]
            found = dict(zip(("q", "k", "v", "g", "beta"), result, strict=True))
            named = {name: x.reshape(*shape, *x.shape[2:]) for name, x in found.items()}
            return {**named, "state": window.clone()}

        return Call(run, outputs, (ROWS, TURNED), mutable=(window,))

    def _rms_norm_gated(self, job: Job) -> Call:
        i, norm = job.inputs, _norm(job, job.inputs["weight"])
        return Call(lambda: norm(i["x"], i["z"]).to(i["x"].dtype), lambda y: {"y": y})

    def _step(self, job: Job) -> Call:
        """Convolution, recurrence and gated norm of one token."""
        return self._layer(job)

    def _layer(self, job: Job) -> Call:
        """As ``_step``, over prompts of one length."""
        c, i, state, window = job.case, job.inputs, _state(job), job.rows("conv_state")
        qkv, z, b, a = split_projections(
            i["qkvz"], i["ba"], order=c.order, Hk=c.Hk, Hv=c.Hv, K=c.K, V=c.V
        )
        if c.flat:
            qkv, z, b, a = (x[:, None] for x in (qkv, z, b, a))
        _few_enough(qkv.shape[1])
        weight, norm = i["conv_weight"].unsqueeze(1), _norm(job, i["norm_weight"])

        def run() -> Tensor:
            mixed = _roll(qkv.transpose(1, 2), window, weight).transpose(1, 2)
            o = _recurrence(state, *_raw(i, *heads_of(mixed, c), a, b))
            return norm(o, z).to(qkv.dtype)

        def outputs(y: Tensor) -> dict[str, Tensor]:
            y = y.flatten(-2)
            kept = {"state": state.clone(), "conv_state": window.clone()}
            return {"y": y[:, 0] if c.flat else y, **kept}

        order = ("projections split",) if c.order == "interleaved" else ()
        return Call(run, outputs, (ROWS, *order), mutable=(state, window))


def _few_enough(tokens: int) -> None:
    if tokens > MOST_TOKENS:
        raise RefusalError(
            f"token by token, to {MOST_TOKENS} of them: its chunked forms are sluice:chunked "
            "and transformers"
        )


def _state(job: Job) -> Tensor:
    state = job.rows()
    if state.dtype != torch.float32:
        raise RefusalError("matrix products want one dtype: a float32 state")
    return state


def _prompts(job: Job) -> tuple[Tensor, Tensor, Tensor]:
    """x [N, D, T], the window that is updated in place, and the weight, for ``_roll``."""
    i, c = job.inputs, job.case
    same = (c.batch, c.tokens) if c.lengths is None else equal_lengths(job)
    if same is None:
        raise RefusalError("has no packed prompts")
    x = as_batch(i["x"], *same).transpose(1, 2).contiguous()
    return x, job.rows(), i["weight"].unsqueeze(1)


def _roll(x: Tensor, window: Tensor, weight: Tensor) -> Tensor:
    """Convolve x [N, D, T] after the window, which is updated in place."""
    longer = torch.cat([window, x], dim=-1)
    window.copy_(longer[..., -window.shape[-1] :])
    return silu(conv1d(longer, weight, groups=weight.shape[0]))


def _norm(job: Job, weight: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """RMS norm of x, gated by z, in float32."""
    gate = silu if job.case.gate_activation == "silu" else torch.sigmoid
    scale = weight.float()

    def norm(x: Tensor, z: Tensor) -> Tensor:
        return rms_norm(x.float(), (job.case.V,), scale, NORM_EPS) * gate(z.float())

    return norm


def _unit(x: Tensor) -> Tensor:
    x = x.float()
    return x * (x.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt()


def _raw(
    i: dict[str, Any], q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor
) -> tuple[Tensor, ...]:
    """The arguments of ``_recurrence``, from raw keys and gates."""
    return _unit(q), _unit(k), v, *raw_gates({**i, "a": a, "b": b})


def _recurrence(state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Run tokens [N, T, ..] through the state [N, Hv, V, K], in place; returns o in float32.

    q and k already have unit length, and each key head serves several value heads.
    """
    r = v.shape[2] // q.shape[2]
    q, k = (x.float().repeat_interleave(r, dim=2).unsqueeze(-1) for x in (q, k))
    q, v = q * q.shape[-2] ** -0.5, v.float().unsqueeze(-1)
    decay, beta = (x.float()[..., None, None] for x in (g.exp(), beta))
    S = state.flatten(0, 1)  # [N·Hv, V, K]
    out = []
    for t in range(q.shape[1]):
        now = (x[:, t].flatten(0, 1) for x in (q, k, v, decay, beta))
        out.append(_update(S, *now).unflatten(0, state.shape[:2]))
    o = torch.stack(out, dim=1) if len(out) > 1 else out[0].unsqueeze(1)
    return o.squeeze(-1)


def _update(S: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """Update S [.., V, K] by one token, in place; returns its output [.., V, 1]."""
    S.mul_(decay)
    d = (v - torch.bmm(S, k)).mul_(beta)
    S.baddbmm_(d, k.transpose(1, 2))
    return torch.bmm(S, q)


def provider() -> Torch:
    return Torch()
