"""transformers' own torch functions, called as its Qwen3.5 layer calls them.

With FLA installed, the module's names point to FLA; the torch functions under them are measured.
Queries and keys are repeated to the value heads inside the timed region, as in the layer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, softplus

from sluice.bench import training
from sluice.bench.providers.base import (
    Call,
    Job,
    Provider,
    RefusalError,
    as_batch,
    equal_lengths,
    heads_of,
    load,
    raw_gates,
    spans,
)
from sluice.testing.oracle import split_projections

MODULE = "transformers.models.qwen3_5.modeling_qwen3_5"
FRESH = "the state comes back in a fresh tensor"
ROWS = "pool rows gathered, state as [K, V]"


class Transformers(Provider):
    name = "transformers"
    title = "transformers"
    package = "transformers"
    install = "pip install transformers"

    def missing(self) -> str | None:
        self.package = MODULE
        try:
            return super().missing()
        finally:
            self.package = "transformers"

    def _prefill(self, job: Job) -> Call:
        if job.case.state_dtype != torch.float32:
            raise RefusalError("its state is float32")
        chunk, r, state = _function("torch_chunk_gated_delta_rule"), _r(job), _kv(job.rows())
        i = job.inputs
        parts, note = _prompts(job, [i[name] for name in ("q", "k", "v", "g", "beta")])
        states = [state] if len(parts) == 1 else list(state.split(1))

        def run() -> list[tuple[Tensor, Tensor]]:
            return [
                _delta(chunk, *part, r=r, state=s) for part, s in zip(parts, states, strict=True)
            ]

        def outputs(result: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
            o = torch.cat([o.flatten(0, 1) for o, _ in result])[None]
            return {"o": o, "state": _kv(torch.cat([s for _, s in result]))}

        return Call(run, outputs, (ROWS, *note, FRESH))

    def _train(self, job: Job) -> Call:
        chunk, r = _function("torch_chunk_gated_delta_rule"), _r(job)

        def function(*leaves: Tensor) -> Tensor:
            parts, _ = _prompts(job, list(leaves))
            made = [_delta(chunk, *part, r=r, state=None)[0] for part in parts]
            return torch.cat([o.flatten(0, 1) for o in made])[None]

        return training.call(job, function, _prompts(job, [job.inputs["v"]])[1])

    def _decode(self, job: Job) -> Call:
        if job.case.state_dtype != torch.float32:
            raise RefusalError("its state is float32")
        recurrent, r, state = (
            _function("torch_recurrent_gated_delta_rule"),
            _r(job),
            _kv(job.rows()),
        )
        i = job.inputs

        def run() -> tuple[Tensor, Tensor]:
            g, beta = _gates(i["g"], i["beta"], i["A_log"], i["dt_bias"])
            return _delta(recurrent, i["q"], i["k"], i["v"], g, beta, r=r, state=state, norm=True)

        return Call(run, lambda x: {"o": x[0], "state": _kv(x[1])}, (ROWS, FRESH))

    def _causal_conv1d(self, job: Job) -> Call:
        roll, notes, mutable = _rolls(job)

        def outputs(result: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
            y = torch.cat([y.transpose(1, 2).flatten(0, 1) for y, _ in result])
            return {"y": y.reshape(job.inputs["x"].shape), "state": _last(job, result)}

        return Call(roll, outputs, notes, mutable=mutable)

    def _conv_qkv(self, job: Job) -> Call:
        """The convolution, then split, norm and gates by the functions the layer uses."""
        roll, notes, mutable = _rolls(job)
        c, l2norm = job.case, _function("l2norm")

        def run() -> tuple[Any, ...]:
            result = roll()
            made = []
            for y, _ in result:
                q, k, v = heads_of(y.transpose(1, 2), c)
                made.append([l2norm(x.float()).to(x.dtype) for x in (q, k)] + [v])
            return result, made, *raw_gates(job.inputs)

        def outputs(result: tuple[Any, ...]) -> dict[str, Tensor]:
            rolled, made, g, beta = result
            shape = job.inputs["x"].shape[:2]
            q, k, v = (
                torch.cat([x.flatten(0, 1) for x in part]) for part in zip(*made, strict=True)
            )
            named = {"q": q, "k": k, "v": v}
            named = {name: x.reshape(*shape, *x.shape[1:]) for name, x in named.items()}
            return {**named, "g": g, "beta": beta, "state": _last(job, rolled)}

        return Call(run, outputs, notes, mutable=mutable)

    def _rms_norm_gated(self, job: Job) -> Call:
        i, c = job.inputs, job.case
        norm = _norm(c.V, i["weight"], c.gate_activation)
        x, z = i["x"].reshape(-1, c.V), i["z"].reshape(-1, c.V)
        return Call(lambda: norm(x, z), lambda y: {"y": y.reshape(i["x"].shape)})

    def _step(self, job: Job) -> Call:
        return self._whole(job, "torch_recurrent_gated_delta_rule")

    def _layer(self, job: Job) -> Call:
        return self._whole(job, "torch_chunk_gated_delta_rule")

    def _whole(self, job: Job, name: str) -> Call:
        """From the projections to the gated norm, in the order of the layer's forward."""
        c, i = job.case, job.inputs
        if c.state_dtype != torch.float32:
            raise RefusalError("its state is float32")
        qkv, z, b, a = split_projections(
            i["qkvz"], i["ba"], order=c.order, Hk=c.Hk, Hv=c.Hv, K=c.K, V=c.V
        )
        if c.flat:
            qkv, z, b, a = (x[:, None] for x in (qkv, z, b, a))
        rule, norm = _function(name), _norm(c.V, i["norm_weight"], c.gate_activation)
        decodes = job.op == "step"
        conv = _function("causal_conv1d_update" if decodes else "causal_conv1d_fn")
        window = _window(job, "conv_state") if decodes else job.rows("conv_state")
        state, weight, r = _kv(job.rows()), i["conv_weight"], _r(job)

        def run() -> tuple[Tensor, Tensor, Tensor]:
            x = qkv.transpose(1, 2)
            if decodes:
                mixed, rolled = conv(x, window, weight, None, "silu"), window
            else:
                mixed, rolled = _conv(conv, x, window, weight)
            q, k, v = heads_of(mixed.transpose(1, 2), c)
            g, beta = _gates(a, b, i["A_log"], i["dt_bias"])
            o, after = _delta(rule, q, k, v, g, beta, r=r, state=state, norm=True)
            y = norm(o.reshape(-1, c.V), z.reshape(-1, c.V)).reshape(*qkv.shape[:2], -1)
            return y, after, rolled

        def outputs(result: tuple[Tensor, Tensor, Tensor]) -> dict[str, Tensor]:
            y, after, rolled = result
            y = y[:, 0] if c.flat else y
            rolled = rolled[..., -c.window :].clone()
            return {"y": y, "state": _kv(after), "conv_state": rolled}

        order = ("projections split",) if c.order == "interleaved" else ()
        mutable = (window,) if decodes else ()
        return Call(run, outputs, (ROWS, *order, FRESH), mutable=mutable)


def _function(name: str) -> Callable[..., Any]:
    """The torch function under the name that transformers' layer looks up."""
    function = inspect.unwrap(getattr(load(MODULE), name))
    if not inspect.isfunction(function):
        raise RefusalError(f"{name} is not a plain function in this version")
    return function


def _norm(V: int, weight: Tensor, activation: str) -> Callable[[Tensor, Tensor], Tensor]:
    if activation != "silu":
        raise RefusalError(f"its norm has no {activation} gate")
    norm = load(MODULE).Qwen3_5RMSNormGated(V).to(weight.device, weight.dtype)
    norm.weight.data.copy_(weight)
    return norm


def _prompts(job: Job, tensors: list[Tensor]) -> tuple[list[list[Tensor]], tuple[str, ...]]:
    """The packed tokens as one batch where lengths are equal, else one call for each prompt."""
    if same := equal_lengths(job):
        return [[as_batch(x, *same) for x in tensors]], ()
    return [[x[:, s] for x in tensors] for s in spans(job)], ("one call for each prompt",)


def _delta(
    rule: Callable[..., Any],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    r: int,
    state: Tensor | None,
    norm: bool = False,
) -> tuple[Tensor, Tensor]:
    if r > 1:
        q, k = q.repeat_interleave(r, dim=2), k.repeat_interleave(r, dim=2)
    return rule(
        q, k, v, g=g, beta=beta,
        initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=norm,
    )  # fmt: skip


def _gates(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """The gates as in the layer: beta in the model's dtype."""
    return -A_log.float().exp() * softplus(a.float() + dt_bias), b.sigmoid()


def _conv(
    function: Callable[..., Tensor], x: Tensor, window: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Prepend the window, convolve, and keep the last T columns and the final window."""
    longer = torch.cat([window, x], dim=-1)
    y = function(longer, weight, None, activation="silu")
    return y[..., -x.shape[-1] :], longer[..., -window.shape[-1] :]


def _rolls(job: Job) -> tuple[Callable[[], Any], tuple[str, ...], tuple[Tensor, ...]]:
    """A function that convolves all tokens: (y [B, D, T], final window) for each part."""
    i, weight = job.inputs, job.inputs["weight"]
    if job.case.lengths is None:
        x, window = i["x"].transpose(1, 2).contiguous(), _window(job)
        update = _function("causal_conv1d_update")

        def decode() -> list[tuple[Tensor, Tensor]]:
            return [(update(x, window, weight, None, "silu"), window)]

        return decode, ("x as [B, D, T]", "window of W columns"), (window,)
    whole = _function("causal_conv1d_fn")
    parts, note = _prompts(job, [i["x"]])
    windows = [job.rows()] if len(parts) == 1 else list(job.rows().split(1))
    xs = [x.transpose(1, 2).contiguous() for (x,) in parts]

    def prompts() -> list[tuple[Tensor, Tensor]]:
        return [_conv(whole, x, w, weight) for x, w in zip(xs, windows, strict=True)]

    return prompts, ("x as [B, D, T]", *note, FRESH), ()


def _last(job: Job, result: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The windows after the call, all sequences, W - 1 columns."""
    return torch.cat([w[..., -job.case.window :] for _, w in result]).clone()


def _window(job: Job, name: str = "state") -> Tensor:
    """The conv rows [N, D, W], with one column more than is read, as in transformers."""
    return pad(job.rows(name), (1, 0))


def _r(job: Job) -> int:
    return job.case.Hv // job.case.Hk


def _kv(state: Tensor) -> Tensor:
    return state.transpose(2, 3).contiguous()


def provider() -> Transformers:
    return Transformers()
