"""ONNX Runtime on a CPU: float32 graphs of com.microsoft nodes, as its exporters write them.

Inputs and outputs are bound to torch's memory, and the recurrent state is read and written in one
buffer, which the operator allows. No copy is timed that a program would not make.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sluice.bench.providers.base import (
    Call,
    Job,
    Provider,
    RefusalError,
    equal_lengths,
    load,
    spans,
)
from sluice.testing.oracle import split_projections

MICROSOFT = "com.microsoft"
ROWS = "pool rows gathered, state as [K, V]"
NO_EPS = "l2 norm without its eps"


class OnnxRuntime(Provider):
    name = "onnxruntime"
    title = "ONNX Runtime"
    package = "onnxruntime"
    install = "pip install onnxruntime onnx"
    devices = ("cpu",)

    def missing(self) -> str | None:
        for package in ("onnx", "onnxruntime"):
            self.package = package
            if reason := super().missing():
                return reason
        return None

    def prepare(self, job: Job) -> Call:
        if job.dtype != torch.float32:
            raise RefusalError("its CPU kernels are float32")
        if job.case.state_dtype != torch.float32:
            raise RefusalError("its state has the dtype of the inputs")
        return super().prepare(job)

    def _prefill(self, job: Job) -> Call:
        c, i, state = job.case, job.inputs, _kv(job.rows())
        graph = job.once("graph", lambda: _attention(c, raw=False, normalize=False))
        same = equal_lengths(job)
        cuts = [slice(None)] if same else spans(job)
        N, T = same or (1, 0)
        o = torch.empty(1, c.grid[1], c.Hv * c.V)
        bindings = []
        for n, cut in enumerate(cuts):
            feeds = {
                name: i[name][:, cut].reshape(N, T or cut.stop - cut.start, -1)
                for name in ("q", "k", "v", "g", "beta")
            }
            S = state if same else state[n : n + 1]
            out = o[:, cut].reshape(*feeds["v"].shape)
            bindings.append(_bind(job, graph, {**feeds, "past": S}, {"o": out, "present": S}))
        note = () if same else ("one call for each prompt",)
        return Call(
            lambda: [run() for run in bindings],
            lambda _: {"o": o.reshape(1, -1, c.Hv, c.V).clone(), "state": _kv(state)},
            (ROWS, *note),
            mutable=(state,),
        )

    def _decode(self, job: Job) -> Call:
        c, i, state = job.case, job.inputs, _kv(job.rows())
        graph = job.once("graph", lambda: _attention(c, raw=True, normalize=True))
        feeds = {name: i[name].flatten(2) for name in ("q", "k", "v")}
        feeds |= {"a": i["g"], "b": i["beta"], **_parameters(i), "past": state}
        o = torch.empty(c.N, 1, c.Hv * c.V)
        run = _bind(job, graph, feeds, {"o": o, "present": state})
        return Call(
            run,
            lambda _: {"o": o.reshape(c.N, 1, c.Hv, c.V).clone(), "state": _kv(state)},
            (ROWS, NO_EPS),
            mutable=(state,),
        )

    def _causal_conv1d(self, job: Job) -> Call:
        c, i = job.case, job.inputs
        graph = job.once("graph", _convolution)
        same = (c.batch, c.tokens) if c.lengths is None else equal_lengths(job)
        if same is None:
            raise RefusalError("has no packed prompts")
        x = i["x"].reshape(*same, c.channels).transpose(1, 2).contiguous()
        y, past = torch.empty_like(x), job.rows()
        present = torch.empty_like(past)
        feeds = {"x": x, "weight": i["weight"].unsqueeze(1), "window": past}
        run = _bind(job, graph, feeds, {"y": y, "rolled": present})

        def outputs(_: Any) -> dict[str, Tensor]:
            return {"y": y.transpose(1, 2).reshape(i["x"].shape).clone(), "state": present.clone()}

        return Call(
            run, outputs, ("pool rows gathered", "x as [B, D, T]", "window in a fresh tensor")
        )

    def _conv_qkv(self, job: Job) -> Call:
        c, i = job.case, job.inputs
        graph = job.once("graph", lambda: _heads(c))
        same = (c.batch, c.tokens) if c.lengths is None else equal_lengths(job)
        if same is None:
            raise RefusalError("has no packed prompts")
        feeds = {name: i[name].reshape(*same, -1) for name in ("x", "a", "b")}
        feeds |= {"qkv": feeds.pop("x"), **_parameters(i)}
        past = job.rows()
        feeds |= {"weight": i["weight"].unsqueeze(1), "window": past}
        key, value = c.Hk * c.K, c.Hv * c.V
        widths = {"q_unit": key, "k_unit": key, "v": value, "decay": c.Hv, "beta": c.Hv}
        made = {name: torch.empty(*same, width) for name, width in widths.items()}
        rolled = torch.empty_like(past)
        run = _bind(job, graph, feeds, {**made, "rolled": rolled})

        def outputs(_: Any) -> dict[str, Tensor]:
            shape = i["x"].shape[:2]
            named = {"q": "q_unit", "k": "k_unit", "v": "v"}
            widths = {"q": (c.Hk, c.K), "k": (c.Hk, c.K), "v": (c.Hv, c.V)}
            found = {n: made[at].reshape(*shape, *widths[n]).clone() for n, at in named.items()}
            gates = {"g": made["decay"], "beta": made["beta"]}
            found |= {n: x.reshape(*shape, c.Hv).clone() for n, x in gates.items()}
            return {**found, "state": rolled.clone()}

        notes = ("pool rows gathered", NO_EPS, "window in a fresh tensor")
        return Call(run, outputs, notes)

    def _rms_norm_gated(self, job: Job) -> Call:
        i, c = job.inputs, job.case
        graph = job.once("graph", lambda: _normalisation(c))
        x, z = (i[name].flatten(2) for name in ("x", "z"))
        y = torch.empty_like(x)
        run = _bind(job, graph, {"x": x, "z": z, "norm": i["weight"]}, {"y": y})
        return Call(run, lambda _: {"y": y.reshape(i["x"].shape).clone()})

    def _step(self, job: Job) -> Call:
        return self._layer(job)

    def _layer(self, job: Job) -> Call:
        c, i, state = job.case, job.inputs, _kv(job.rows())
        qkv, z, b, a = split_projections(
            i["qkvz"], i["ba"], order=c.order, Hk=c.Hk, Hv=c.Hv, K=c.K, V=c.V
        )
        graph = job.once("graph", lambda: _whole(c))
        B, T = (c.N, 1) if c.flat else c.grid
        past, y = job.rows("conv_state"), torch.empty(B, T, c.Hv * c.V)
        rolled = torch.empty_like(past)
        parts = {"qkv": qkv, "z": z.flatten(-2), "a": a, "b": b}
        feeds = {name: x.reshape(B, T, -1).contiguous() for name, x in parts.items()}
        feeds |= {**_parameters(i), "weight": i["conv_weight"].unsqueeze(1)}
        feeds |= {"window": past, "past": state, "norm": i["norm_weight"]}
        run = _bind(job, graph, feeds, {"y": y, "rolled": rolled, "present": state})

        def outputs(_: Any) -> dict[str, Tensor]:
            shaped = y.reshape(B, -1) if c.flat else y
            return {"y": shaped.clone(), "state": _kv(state), "conv_state": rolled.clone()}

        return Call(run, outputs, (ROWS, NO_EPS, "window in a fresh tensor"), mutable=(state,))


# ---------------------------------------------------------------------------------------- graphs


@dataclass
class _Graph:
    """Nodes in the order they are added, and the names of inputs and outputs."""

    nodes: list[Any] = field(default_factory=list)
    constants: list[Any] = field(default_factory=list)
    inputs: list[tuple[str, int]] = field(default_factory=list)  # name, number of dimensions
    outputs: list[tuple[str, int]] = field(default_factory=list)

    def add(self, op: str, inputs: list[str], outputs: list[str], domain: str = "", **options: Any):
        helper = load("onnx").helper
        self.nodes.append(helper.make_node(op, inputs, outputs, domain=domain, **options))

    def shape(self, name: str, values: list[int]) -> str:
        onnx = load("onnx")
        kind = onnx.TensorProto.INT64
        self.constants.append(onnx.helper.make_tensor(name, kind, [len(values)], values))
        return name

    def model(self) -> bytes:
        onnx = load("onnx")
        helper, real = onnx.helper, onnx.TensorProto.FLOAT

        def info(name: str, rank: int) -> Any:
            return helper.make_tensor_value_info(name, real, [f"{name}{d}" for d in range(rank)])

        graph = helper.make_graph(
            self.nodes,
            "bench",
            [info(*x) for x in self.inputs],
            [info(*x) for x in self.outputs],
            initializer=self.constants,
        )
        opsets = [helper.make_opsetid("", 20), helper.make_opsetid(MICROSOFT, 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()


def _unit(g: _Graph, name: str, c: Any) -> str:
    """l2 norm over each head."""
    g.add("Reshape", [name, g.shape(f"{name}_heads", [0, 0, c.Hk, c.K])], [f"{name}_split"])
    g.add("LpNormalization", [f"{name}_split"], [f"{name}_normed"], axis=-1, p=2)
    g.add("Reshape", [f"{name}_normed", g.shape(f"{name}_flat", [0, 0, -1])], [f"{name}_unit"])
    return f"{name}_unit"


def _rule(g: _Graph, c: Any, q: str, k: str, v: str, decay: str, beta: str) -> None:
    heads = {"q_num_heads": c.query_heads, "kv_num_heads": c.Hv, "update_rule": "gated_delta"}
    g.add("LinearAttention", [q, k, v, "past", decay, beta], ["o", "present"], MICROSOFT, **heads)


def _gate(g: _Graph) -> None:
    g.add("LinearAttentionGate", ["a", "dt_bias", "rate", "b"], ["decay", "beta"], MICROSOFT)


def _attention(c: Any, raw: bool, normalize: bool) -> bytes:
    g = _Graph(inputs=[("q", 3), ("k", 3), ("v", 3)], outputs=[("o", 3), ("present", 4)])
    decay, beta = "g", "beta"
    if raw:
        g.inputs += [("a", 3), ("b", 3), ("dt_bias", 1), ("rate", 1)]
        _gate(g)
        decay = "decay"
    else:
        g.inputs += [("g", 3), ("beta", 3)]
    g.inputs.append(("past", 4))
    q, k = (_unit(g, "q", c), _unit(g, "k", c)) if normalize else ("q", "k")
    _rule(g, c, q, k, "v", decay, beta)
    return g.model()


def _roll(g: _Graph, x: str, y: str) -> None:
    """Convolution and silu, without the third input, the bias."""
    inputs, outputs = [x, "weight", "", "window"], [y, "rolled"]
    g.add("CausalConvWithState", inputs, outputs, MICROSOFT, activation="silu")


def _convolution() -> bytes:
    g = _Graph(inputs=[("x", 3), ("weight", 3), ("window", 3)], outputs=[("y", 3), ("rolled", 3)])
    _roll(g, "x", "y")
    return g.model()


def _normed(g: _Graph, c: Any, x: str) -> None:
    options = {"epsilon": 1e-6, "activation": c.gate_activation}
    g.add("GatedRMSNorm", [x, "norm", "z"], ["y"], MICROSOFT, **options)


def _normalisation(c: Any) -> bytes:
    g = _Graph(inputs=[("x", 3), ("z", 3), ("norm", 1)], outputs=[("y", 3)])
    _normed(g, c, "x")
    return g.model()


def _split(g: _Graph, c: Any) -> None:
    """Transpose to channels first, convolve, transpose back, and split into q, k, v."""
    g.add("Transpose", ["qkv"], ["x"], perm=[0, 2, 1])
    _roll(g, "x", "mixed")
    g.add("Transpose", ["mixed"], ["tokens"], perm=[0, 2, 1])
    widths = g.shape("widths", [c.Hk * c.K, c.Hk * c.K, c.Hv * c.V])
    g.add("Split", ["tokens", widths], ["q", "k", "v"], axis=-1)


def _heads(c: Any) -> bytes:
    names = [("qkv", 3), ("a", 3), ("b", 3), ("dt_bias", 1), ("rate", 1), ("weight", 3)]
    made = [(name, 3) for name in ("q_unit", "k_unit", "v", "decay", "beta", "rolled")]
    g = _Graph(inputs=[*names, ("window", 3)], outputs=made)
    _split(g, c)
    _gate(g)
    _unit(g, "q", c)
    _unit(g, "k", c)
    return g.model()


def _whole(c: Any) -> bytes:
    names = [("qkv", 3), ("z", 3), ("a", 3), ("b", 3), ("dt_bias", 1), ("rate", 1), ("weight", 3)]
    g = _Graph(
        inputs=[*names, ("window", 3), ("past", 4), ("norm", 1)],
        outputs=[("y", 3), ("rolled", 3), ("present", 4)],
    )
    _split(g, c)
    _gate(g)
    _rule(g, c, _unit(g, "q", c), _unit(g, "k", c), "v", "decay", "beta")
    _normed(g, c, "o")
    return g.model()


# --------------------------------------------------------------------------------------- running


def _bind(job: Job, model: bytes, feeds: dict[str, Tensor], results: dict[str, Tensor]) -> Any:
    """A function of no arguments that runs the model on this memory."""
    session = job.once("session", lambda: _session(model, job.threads))
    binding = session.io_binding()
    held = {**{n: x.contiguous() for n, x in feeds.items()}, **results}
    for name, x in held.items():
        if not x.is_contiguous():
            raise RefusalError(f"{name} must be contiguous")
        bind = binding.bind_output if name in results else binding.bind_input
        bind(name, "cpu", 0, load("onnx").TensorProto.FLOAT, list(x.shape), x.data_ptr())

    def run(_held: Any = held) -> None:  # keeps the bound tensors alive
        session.run_with_iobinding(binding)

    return run


def _session(model: bytes, threads: int) -> Any:
    ort = load("onnxruntime")
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    # its threads spin during a run only: between runs other providers are timed on the cores
    options.add_session_config_entry("session.force_spinning_stop", "1")
    try:
        return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise RefusalError(str(error).strip().splitlines()[0]) from error


def _parameters(i: dict[str, Any]) -> dict[str, Tensor]:
    return {"dt_bias": i["dt_bias"], "rate": -i["A_log"].exp()}


def _kv(state: Tensor) -> Tensor:
    return state.transpose(2, 3).contiguous()


def provider() -> OnnxRuntime:
    return OnnxRuntime()
