"""Integration with torch: custom ops, schemas and fakes, compile, export, refused gradients."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim
from torch.utils._python_dispatch import TorchDispatchMode

import sluice
from sluice import calls
from sluice.testing import build
from sluice.testing.case import Case
from sluice.testing.compare import assert_same_bits

HK, HV, K, V, W = 2, 4, 8, 6, 4
D = 2 * HK * K + HV * V
COMMON = {"Hk": HK, "Hv": HV, "K": K, "V": V, "raw": True, "normalize": True}

CASES = {
    "prefill": Case("torch/prefill", "prefill", batch=2, tokens=5, moved=True, every=2, **COMMON),
    "decode": Case("torch/decode", "decode", batch=3, tokens=2, padded=(1,), **COMMON),
    "verify": Case("torch/verify", "verify", batch=2, tokens=3, with_conv=True, **COMMON),
    "causal_conv1d": Case("torch/conv", "causal_conv1d", lengths=(3, 0, 4), tail=2, **COMMON),
    "conv_qkv": Case("torch/conv_qkv", "conv_qkv", batch=2, tokens=5, new=(1,), **COMMON),
    "rms_norm_gated": Case("torch/norm", "rms_norm_gated", batch=2, tokens=3, **COMMON),
    "step": Case("torch/step", "step", batch=2, order="interleaved", **COMMON),
}
OPERATORS = tuple(calls.OPERATORS)

MUTATES = {
    "prefill": {"state", "out"},
    "decode": {"state", "out"},
    "verify": {"out", "draft_k", "draft_d", "draft_g", "draft_x"},
    "commit": {"state", "conv_state"},
    "causal_conv1d": {"state", "out"},
    "conv_qkv": {"state", "q", "k", "v", "g", "beta"},
    "rms_norm_gated": {"out"},
    "step": {"conv_state", "state", "out"},
}


@pytest.fixture(autouse=True)
def _nothing_is_clean() -> None:
    """torch's compilers call torch.empty here, so it is not replaced."""


def _inputs(op: str, device: str = "cpu") -> dict[str, Any]:
    """New arguments of the public function, with the same values in each call."""
    inputs = CASES["verify" if op == "commit" else op].inputs(torch.float32, device)
    accepted = inputs.pop("num_accepted", None)
    if inputs.get("checkpoints") is not None:
        inputs["checkpoints"] = sluice.Checkpoints(**inputs["checkpoints"])
    if op == "commit":
        return {"draft": sluice.verify(**inputs)[1], "num_accepted": accepted - 1}
    if op == "verify":  # into buffers, which is every tensor it can have
        inputs |= build.buffers(CASES["verify"], inputs, sluice.DraftBuffers)
    return inputs


def _run(op: str, inputs: dict[str, Any] | None = None) -> list[Tensor]:
    """The tensors that a call returns."""
    return _tensors(getattr(sluice, op)(**(_inputs(op) if inputs is None else inputs)))


def _tensors(result: Any) -> list[Tensor]:
    if isinstance(result, sluice.Draft):
        return [x for x in (result.k, result.d, result.g) if x is not None]
    if isinstance(result, (tuple, list)):
        return [x for part in result for x in _tensors(part)]
    return [] if result is None else [result]


def _flat_arguments(op: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, ...]:
    """The arguments that ``torch.ops.sluice.<op>`` gets; the call itself is not made."""
    inputs, found = _inputs(op), []

    def keep(operator: Any, tensors: Any, options: Any, form: Any, backend: Any) -> list[Any]:
        canonical = operator.canonical(operator.spec.Tensors(*tensors), options, form).tensors
        found.append((*canonical, *options, backend))
        return list(canonical)

    with monkeypatch.context() as patch:
        patch.setattr(calls, "call", keep)
        _run(op, inputs)
    (arguments,) = found
    return arguments


# ------------------------------------------------------------------------- schemas, fakes, opcheck


@pytest.mark.parametrize("op", OPERATORS)
def test_opcheck_passes(op, monkeypatch):
    args = _flat_arguments(op, monkeypatch)
    results = torch.library.opcheck(getattr(torch.ops.sluice, op).default, args)
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("op", OPERATORS)
def test_the_schema_says_what_is_mutated(op):
    schema = getattr(torch.ops.sluice, op).default._schema
    marked = {a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write}
    assert marked == MUTATES[op]
    assert schema.returns == []


@pytest.mark.parametrize("op", OPERATORS)
def test_exactly_what_is_marked_changes(op, monkeypatch):
    args = _flat_arguments(op, monkeypatch)
    overload = getattr(torch.ops.sluice, op).default
    names = [a.name for a in overload._schema.arguments]
    before = [x.clone() if isinstance(x, Tensor) else x for x in args]
    overload(*args)
    changed = {
        name
        for name, x, old in zip(names, args, before, strict=True)
        if isinstance(x, Tensor) and not torch.equal(x.nan_to_num(7.0), old.nan_to_num(7.0))
    }
    assert changed == MUTATES[op]


@pytest.mark.parametrize("op", OPERATORS)
def test_the_custom_op_gives_the_same_bits(op):
    """A dispatch mode that only watches makes every call a node; no bit may change."""

    class Watch(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[str] = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.seen.append(str(func))
            return func(*args, **(kwargs or {}))

    plain, inputs = _run(op), _inputs(op)
    with Watch() as watch:
        watched = _run(op, inputs)
    assert [name for name in watch.seen if "sluice" in name] == [f"sluice.{op}.default"]
    for i, (a, b) in enumerate(zip(watched, plain, strict=True)):
        assert_same_bits(a, b, f"{op}: output {i}")


@pytest.mark.parametrize("op", OPERATORS)
def test_meta_tensors_give_shapes_and_run_nothing(op):
    for x, y in zip(_run(op, _inputs(op, "meta")), _run(op), strict=True):
        assert x.is_meta
        assert (x.shape, x.dtype, x.stride()) == (y.shape, y.dtype, y.stride())


@pytest.mark.parametrize("inside", [True, False], ids=["in the mode", "after the mode"])
@pytest.mark.parametrize("op", ["prefill", "conv_qkv", "step"])
def test_fake_tensors_give_fake_outputs(op, inside):
    expected, inputs, mode = _run(op), _inputs(op), FakeTensorMode()
    for name, x in inputs.items():
        if isinstance(x, Tensor):
            inputs[name] = mode.from_tensor(x)
        elif isinstance(x, sluice.Checkpoints):
            inputs[name] = x._replace(slots=mode.from_tensor(x.slots))
    with mode if inside else torch.no_grad():
        found = _run(op, inputs)
    assert all(x.fake_mode is mode for x in found)
    assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in expected]


def test_fake_tensors_are_checked_too():
    with FakeTensorMode(), pytest.raises(sluice.ContractError, match="z: expected shape"):
        sluice.rms_norm_gated(torch.ones(2, 4), torch.ones(2, 3), torch.ones(4))


# ----------------------------------------------------------------------------- compile and export


class Layer(nn.Module):
    """A layer without projections: convolution, recurrence over a prompt, gated norm."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=generator))

        self.conv, self.bias = parameter(D, W), parameter(D)
        self.A_log, self.dt_bias, self.weight = parameter(HV), parameter(HV), parameter(V)

    def forward(
        self, x: Tensor, z: Tensor, ba: Tensor, window: Tensor, state: Tensor, slots: Tensor
    ) -> Tensor:
        b, a = ba.split(HV, dim=-1)
        q, k, v, g, beta = sluice.conv_qkv(
            x,
            self.conv,
            self.bias,
            num_k_heads=HK,
            num_v_heads=HV,
            head_k_dim=K,
            head_v_dim=V,
            a=a,
            b=b,
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            state=window,
            slots=slots,
        )
        o, _ = sluice.prefill(q, k, v, g, beta, state=state, slots=slots)
        y = sluice.rms_norm_gated(o, z.unflatten(-1, (HV, V)), self.weight)
        return y.flatten(-2) * 2.0

    @staticmethod
    def inputs(T: int, N: int = 2) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(T)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        pools = (random(11, D, W - 1), random(11, HV, V, K))
        tokens = (random(N, T, D), random(N, T, HV * V), random(N, T, 2 * HV))
        return (*tokens, *pools, torch.tensor([3, 1, 0, 4][:N]))


class Decode(Layer):
    """A step, then a decode on top of it: both keep their states in place."""

    def forward(
        self, x: Tensor, z: Tensor, ba: Tensor, window: Tensor, state: Tensor, slots: Tensor
    ) -> Tensor:
        y = sluice.step(
            (x, z),
            ba,
            conv_weight=self.conv,
            conv_bias=self.bias,
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            norm_weight=self.weight,
            conv_state=window,
            state=state,
            slots=slots,
        )
        q, k, v = x.split([HK * K, HK * K, HV * V], dim=-1)
        q, k = q.unflatten(-1, (HK, K)), k.unflatten(-1, (HK, K))
        v = v.unflatten(-1, (HV, V)) + y.unflatten(-1, (HV, V))
        o, _ = sluice.decode(q, k, v, normalize_qk=True, state=state, slots=slots)
        return o + 1.0


def _same_as_eager(run: Callable[..., Tensor], model: nn.Module, args: tuple[Tensor, ...]) -> None:
    expected_args = copy.deepcopy(args)
    expected = model(*expected_args)
    found = run(*args)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    for i, (x, y) in enumerate(zip(args, expected_args, strict=True)):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6, msg=f"argument {i} afterwards")
    assert not torch.equal(args[4], type(model).inputs(args[0].shape[1])[4]), "no state was written"


@pytest.mark.parametrize("model", [Layer(), Decode()], ids=["prefill", "decode"])
def test_compile_without_graph_breaks(model):
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=False)
    with torch.no_grad():
        _same_as_eager(compiled, model, model.inputs(T=5))


def _with_buffers(x: Tensor, k: Tensor, state: Tensor, *kept: Tensor) -> tuple[Tensor, Tensor]:
    buffers = sluice.DraftBuffers(*kept)
    for i in range(2):
        o, _ = sluice.verify(x, k, x, state=state[i], buffers=buffers.layer(i))
    sluice.commit_layers(buffers, torch.tensor([1, 2]), state=state)
    return o, state


def _with_drafts_by_row(x: Tensor, k: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    for accepted in (1, 2):
        o, draft = sluice.verify(x, k, x, state=state)
        sluice.commit(draft, torch.tensor([accepted, 2]))
    _, draft = sluice.verify(x, k, x, state=state)
    return o, state, draft.d


def _with_a_state_for_each_token(x: Tensor, state: Tensor, conv: Tensor) -> tuple[Tensor, ...]:
    y, _ = sluice.causal_conv1d(x, x[0, :4].T, state=conv, window_start=torch.tensor([0, 1]))
    q = y.unflatten(-1, (2, 4))
    writes = torch.tensor([[0, 2, 3, 6], [4, 5, 7, 1]])
    o, _ = sluice.decode(q, q, q, state=state, write_slots=writes)
    return o, state, conv


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (
            _with_buffers,
            [(2, 3, 2, 4), (2, 3, 1, 4), (2, 2, 2, 4, 4), (2, 2, 3, 1, 4), (2, 2, 3, 2, 4)],
        ),
        (_with_drafts_by_row, [(2, 3, 2, 4), (2, 3, 1, 4), (2, 2, 4, 4)]),
        (_with_a_state_for_each_token, [(2, 4, 8), (8, 2, 4, 4), (2, 8, 6)]),
    ],
)
def test_compile_drafts_as_engines_keep_them(function, shapes):
    def new() -> list[Tensor]:
        gen = torch.Generator().manual_seed(0)
        return [torch.randn(*shape, generator=gen) for shape in shapes]

    got = torch.compile(function, fullgraph=True, backend="aot_eager")(*new())
    for a, b in zip(got, function(*new()), strict=True):
        assert_same_bits(a, b, "compiled")


def test_compile_with_inductor():
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        pytest.skip("no C++ compiler for inductor")
    torch._dynamo.reset()

    def call(qkv: Tensor, state: Tensor) -> Tensor:
        q, k, v = (2 * qkv).split(1, dim=2)  # strided views of inductor's output
        return sluice.decode(q, k, v, normalize_qk=True, state=state)[0].relu()

    # simple code compiles fastest
    options = {"cpp.simdlen": 0, "cpp_cache_precompile_headers": False}
    compiled = torch.compile(call, fullgraph=True, dynamic=False, options=options)
    qkv, state = torch.randn(2, 3, 3, 8), torch.randn(2, 1, 8, 8)
    expected_state = state.clone()
    expected = call(qkv, expected_state)
    torch.testing.assert_close(compiled(qkv, state), expected)
    torch.testing.assert_close(state, expected_state)


def test_compile_once_for_all_lengths():
    torch._dynamo.reset()
    model, graphs = Layer(), []

    def backend(graph: torch.fx.GraphModule, example: list[Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, fullgraph=True, backend=backend, dynamic=True)
    with torch.no_grad():
        for T in (7, 9, 2, 70, 130):  # torch ties equal sizes, so the first length differs from all
            _same_as_eager(compiled, model, model.inputs(T))
    assert len(graphs) == 1


def test_compiled_rules_are_checked():
    """A call that breaks the contract fails during compilation, with the contract's error."""
    torch._dynamo.reset()

    def call(x: Tensor) -> Tensor:
        return sluice.rms_norm_gated(x, x, x[0, :-1])

    with pytest.raises(Exception, match="weight: expected shape"):
        torch.compile(call, fullgraph=True, backend="aot_eager")(torch.ones(2, 4))


def test_compiled_values_are_checked():
    torch._dynamo.reset()

    def call(x: Tensor, state: Tensor, slots: Tensor) -> Tensor:
        return sluice.decode(x, x, x, state=state, slots=slots)[0]

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    x, state = torch.ones(2, 1, 1, 4), torch.zeros(3, 1, 4, 4)
    compiled(x, state, torch.tensor([0, 2]))
    with pytest.raises(sluice.ContractError, match=r"slots\[1\]: expected a slot below 3"):
        compiled(x, state, torch.tensor([0, 3]))


def test_use_backend_reaches_compiled_code():
    torch._dynamo.reset()
    x = torch.ones(1, 3, 1, 4)
    compiled = torch.compile(lambda x: sluice.prefill(x, x, x)[0], backend="aot_eager")
    compiled(x)
    with (
        sluice.use_backend("chunked"),
        pytest.raises(sluice.BackendError, match="chunked"),
    ):
        torch.compile(lambda x: sluice.decode(x, x, x)[0], backend="aot_eager")(x)


@pytest.mark.parametrize(
    ("model", "most"), [(Layer(), 4096), (Decode(), 8)], ids=["prefill", "decode"]
)
def test_export_with_any_number_of_tokens(model, most):
    T = Dim("T", min=2, max=most)
    shapes = ({1: T}, {1: T}, {1: T}, None, None, None)
    with torch.no_grad():
        program = torch.export.export(model, model.inputs(T=4), dynamic_shapes=shapes)
    ops = [str(node.target) for node in program.graph.nodes if "sluice" in str(node.target)]
    assert len(ops) == (3 if most > 8 else 2)
    functional = program.run_decompositions({})
    mutated = set(functional.graph_signature.user_inputs_to_mutate.values())
    assert mutated == {"window", "state"}
    with torch.no_grad():
        for length in (4, 2, 7):
            _same_as_eager(program.module(), model, model.inputs(length))


def test_an_exported_program_survives_a_file(tmp_path):
    model = Layer()
    with torch.no_grad():
        program = torch.export.export(model, model.inputs(T=4))
        torch.export.save(program, tmp_path / "layer.pt2")
        loaded = torch.export.load(tmp_path / "layer.pt2")
        _same_as_eager(loaded.module(), model, model.inputs(T=4))


# ------------------------------------------------------ no gradients through what is in place

INPUTS = {
    "prefill": ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "state"),
    "decode": ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "state"),
    "verify": ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "state"),
    "causal_conv1d": ("x", "weight", "bias", "state"),
    "conv_qkv": ("x", "weight", "bias", "a", "b", "A_log", "dt_bias", "state"),
    "step": ("qkvz", "ba", "conv_weight", "A_log", "dt_bias", "norm_weight", "conv_state", "state"),
}


@pytest.mark.parametrize(
    ("op", "name"), [(op, name) for op, names in INPUTS.items() for name in names]
)
def test_a_backward_pass_is_refused_and_never_zero(op, name):
    """For every input that wants a gradient, and every output."""
    for i in range(len(_run(op))):
        inputs = _inputs(op)  # with a state, or a buffer, that is written in place
        leaf = inputs[name] = inputs[name].detach().nan_to_num(0.0).requires_grad_()
        loss = _run(op, inputs)[i].double().nan_to_num().sum() + leaf.double().sum()
        with pytest.raises(sluice.SluiceError, match=f"{op}: no gradient is defined"):
            loss.backward()
        assert leaf.grad is None


def test_a_backward_pass_through_commit_is_refused():
    x = torch.ones(2, 3, 1, 4, requires_grad=True)
    _, draft = sluice.verify(x, x, x, state=torch.zeros(2, 1, 4, 4))
    state = sluice.commit(draft, torch.tensor([1, 2]))
    with pytest.raises(sluice.SluiceError, match="commit: no gradient is defined"):
        (state.sum() + x.sum()).backward()


def test_a_state_that_wants_a_gradient_can_be_stepped_again():
    """Without no_grad() the backward pass is refused, but the next call works."""
    x, pool = torch.ones(1, 1, 1, 4, requires_grad=True), torch.zeros(1, 1, 4, 4)
    state = pool
    for _ in range(3):
        _, state = sluice.decode(x, x, x, state=state)
    assert state.data_ptr() == pool.data_ptr()
    assert float(pool[0, 0, 0, 0]) == 3.0


def test_compiling_a_call_that_wants_gradients_is_refused():
    torch._dynamo.reset()
    x = torch.ones(2, 1, 1, 4, requires_grad=True)
    compiled = torch.compile(
        lambda x: sluice.decode(x, x, x)[0], fullgraph=True, backend="aot_eager"
    )
    with pytest.raises(Exception, match="no gradient is defined"):
        compiled(x)


def test_a_functional_gradient_is_refused():
    x, w = torch.ones(2, 4), torch.ones(4)
    with pytest.raises(sluice.SluiceError, match="no gradient is defined"):
        torch.func.grad(lambda x: sluice.rms_norm_gated(x, x, w).sum())(x)


@pytest.mark.parametrize("op", OPERATORS)
def test_inference_mode_gives_the_same_bits(op):
    expected = _run(op)
    with torch.inference_mode():
        found = _run(op)
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert_same_bits(a, b, f"{op}: output {i}")


def test_no_gradient_is_asked_where_none_is_wanted():
    x = torch.ones(2, 4, requires_grad=True)
    with torch.no_grad():
        assert not sluice.rms_norm_gated(x, x, torch.ones(4)).requires_grad
    assert not sluice.rms_norm_gated(x.detach(), x.detach(), torch.ones(4)).requires_grad
