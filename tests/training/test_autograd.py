"""What autograd and its companions ask of operators with gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import sluice
from sluice.layers import GatedDeltaNet, QwenShape
from sluice.testing.compare import assert_same_bits, assert_within
from tests.training.calls import Call, states_in_backward

pytestmark = pytest.mark.filterwarnings("ignore::sluice.SlowPathWarning")
SHAPE = QwenShape("small", 32, 2, 4, 1, (0,), head_k_dim=8, head_v_dim=16)
SMALL = Call("small", T=9, B=1, K=4, V=3)


@pytest.fixture
def layer():
    torch.manual_seed(0)
    return GatedDeltaNet(SHAPE)


def gradients_of(function, x, layer, **options):
    x = x.clone().requires_grad_()
    function(x, **options).square().sum().backward()
    found = {"x": x.grad, **{name: p.grad for name, p in layer.named_parameters()}}
    for p in layer.parameters():
        p.grad = None
    return found


@pytest.mark.parametrize("decay", ["head", "key"])
@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_finite_differences_agree(backend, decay):
    call = SMALL.of(raw=True, decay=decay)
    leaves, options = call.make(torch.float64)

    def run(*x):
        return sluice.prefill(**dict(zip(leaves, x, strict=True)), **options, backend=backend)

    assert torch.autograd.gradcheck(run, list(leaves.values()), fast_mode=True)


@pytest.mark.parametrize("op", ["causal_conv1d", "conv_qkv", "rms_norm_gated"])
def test_finite_differences_agree_around_the_recurrence(op):
    def drawn(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=gen).requires_grad_()

    gen = torch.Generator().manual_seed(0)
    if op == "rms_norm_gated":
        leaves = [drawn(3, 5), drawn(3, 5), drawn(5)]
        assert torch.autograd.gradcheck(sluice.rms_norm_gated, leaves, fast_mode=True)
        return
    bounds = torch.tensor([0, 2, 2, 8])  # and a token after the last border
    leaves = [drawn(1, 9, 12), drawn(12, 4), drawn(12), drawn(3, 12, 3)]
    if op == "conv_qkv":
        leaves += [drawn(1, 9, 2), drawn(1, 9, 2), drawn(2), drawn(2)]

    def run(x, weight, bias, window, *gates):
        given = dict(zip(("a", "b", "A_log", "dt_bias"), gates, strict=False))
        sizes = {"num_k_heads": 1, "num_v_heads": 2, "head_k_dim": 2} if gates else {}
        return getattr(sluice, op)(
            x, weight, bias, initial_state=window, cu_seqlens=bounds, **given, **sizes
        )

    assert torch.autograd.gradcheck(run, leaves, fast_mode=True)


@pytest.mark.parametrize("kind", ["rows", "packed", "padded", "checkpoint"])
def test_a_compiled_training_step_has_the_same_gradients(layer, kind):
    torch._dynamo.reset()
    x, options = torch.randn(1 if kind == "packed" else 2, 12, 32), {}
    if kind == "packed":
        options["cu_seqlens"] = torch.tensor([0, 5, 12])
    elif kind == "padded":
        options["attention_mask"] = torch.ones(2, 12)
        options["attention_mask"][0, :3] = 0

    def step(x, **options):
        if kind == "checkpoint":
            return checkpoint(layer, x, use_reentrant=False)
        return layer(x, **options)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    plain = gradients_of(layer, x, layer, **options)
    found = gradients_of(compiled, x, layer, **options)
    for name, exact in plain.items():
        assert_within(found[name], exact, 1e-6, name=name)


def functional_arguments(op):
    """Arguments of ``torch.ops.sluice.<op>_functional``."""
    if op == "prefill":
        leaves, _ = SMALL.of(raw=True).make(torch.float32)
        names = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
        args = [leaves[name] for name in names]
        return [*args, None, None, None, True, False, -1, "vk", 0, False, None, None]
    if op == "rms_norm_gated":
        x = torch.randn(3, 4, requires_grad=True)
        return [x, x.detach(), torch.ones(4), 1e-6, "silu", None, None]
    x, weight = torch.randn(1, 9, 24, requires_grad=True), torch.randn(24, 4, requires_grad=True)
    window, bounds = torch.randn(2, 24, 3, requires_grad=True), torch.tensor([0, 2, 8])
    args = [x, weight, None, window, bounds, None]
    if op == "causal_conv1d":
        return [*args, "silu", -1, False, 0, None, None]
    gates = torch.randn(1, 9, 2, requires_grad=True)
    A_log = torch.zeros(2, requires_grad=True)
    return [*args, gates, gates, A_log, None, "silu", -1, False, 0, True, False, [1, 2, 6, 6], None]


@pytest.mark.parametrize("op", ["prefill", "rms_norm_gated", "causal_conv1d", "conv_qkv"])
def test_opcheck_of_the_functional_operators(op):
    overload = getattr(torch.ops.sluice, f"{op}_functional").default
    results = torch.library.opcheck(overload, tuple(functional_arguments(op)))
    assert set(results.values()) == {"SUCCESS"}


class Recorder(TorchDispatchMode):
    """Lists the operators of sluice that torch sees."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "sluice":
            self.seen.append(func.name())
        return func(*args, **(kwargs or {}))


def test_a_call_that_torch_traces_is_a_node_each_way_with_the_bits_of_an_eager_one():
    leaves, options = Call("any", lengths=(5, 0, 64)).make(torch.float32)

    def made():
        o, final = sluice.prefill(**leaves, **options)
        grads = torch.autograd.grad(o.sum() + final.square().sum(), list(leaves.values()))
        return dict(zip(leaves, grads, strict=True)) | {"o": o, "final": final}

    plain = made()
    assert plain["o"].grad_fn.name() == "sluice_prefillBackward"  # no node: nothing dispatched
    with Recorder() as mode:
        traced = made()
    assert mode.seen == ["sluice::prefill_functional", "sluice::prefill_backward"]
    assert traced["o"].grad_fn.name() != plain["o"].grad_fn.name()
    for name, exact in plain.items():
        assert_same_bits(traced[name], exact, name)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_gives_the_same_bits(layer, reentrant):
    x = torch.randn(2, 70, 32)
    plain = gradients_of(layer, x, layer)
    found = gradients_of(lambda y: checkpoint(layer, y, use_reentrant=reentrant), x, layer)
    for name, exact in plain.items():
        assert_same_bits(found[name], exact, name)


def test_autocast_makes_16_bit_products_outside_of_the_operators_only(layer):
    x = torch.randn(2, 70, 32)

    def cast(y):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            made = layer(y)
        assert made.dtype == torch.bfloat16
        return made.float()

    by_hand = copy.deepcopy(layer)
    for part in by_hand.modules():
        if isinstance(part, torch.nn.Linear):
            part.to(torch.bfloat16)
    plain = gradients_of(lambda y: by_hand(y.bfloat16()).float(), x, by_hand)
    found = gradients_of(cast, x, layer)
    for name, exact in plain.items():
        assert_within(found[name], exact.float(), 6e-3, name=name)
    call = Call("float32", T=70)
    leaves, options = call.make(torch.float32)
    exact = torch.autograd.grad(sluice.prefill(**leaves, **options)[0].sum(), leaves["q"])[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o = sluice.prefill(**leaves, **options, backend="chunked")[0]
        inside = torch.autograd.grad(o.sum(), leaves["q"])[0]
    assert_within(inside, exact, 1e-5, name="dq inside of autocast")


@pytest.mark.parametrize("op", ["prefill", "rms_norm_gated", "causal_conv1d", "conv_qkv"])
def test_second_derivatives_are_refused(op):
    x = torch.randn(1, 9, 2, 4, requires_grad=True)
    y = {
        "prefill": lambda: sluice.prefill(x, x, x)[0],
        "rms_norm_gated": lambda: sluice.rms_norm_gated(x, x, torch.ones(4)),
        "causal_conv1d": lambda: sluice.causal_conv1d(x.flatten(2), torch.ones(8, 3))[0],
        "conv_qkv": lambda: sluice.conv_qkv(
            x.flatten(2), torch.ones(8, 3), num_k_heads=1, num_v_heads=2, head_k_dim=2
        )[2],
    }[op]()
    with pytest.raises(sluice.SluiceError, match=f"{op} has first derivatives only"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


def test_nothing_is_written_in_the_functional_form():
    leaves, options = Call("any").make(torch.float32)
    before = {name: y.detach().clone() for name, y in leaves.items()}
    versions = {name: y._version for name, y in leaves.items()}
    o, final = sluice.prefill(**leaves, **options)
    (o.sum() + final.sum()).backward()
    for name, y in leaves.items():
        assert y._version == versions[name]
        assert_same_bits(y.detach(), before[name], name)


def test_the_functional_form_without_gradients_is_the_form_in_place():
    leaves, options = Call("any", lengths=(5, 0, 64)).make(torch.float32)
    with torch.no_grad():
        first = leaves.pop("initial_state")
        o, final = sluice.prefill(**leaves, initial_state=first, **options)
        pool = first.clone()
        other, state = sluice.prefill(**leaves, state=pool, **options)
    assert_same_bits(o, other, "o")
    assert_same_bits(final, state, "final state")
    assert state is pool


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"state": torch.zeros(2, 4, 24, 16)}, "state"),
        ({"slots": torch.tensor([0, 1])}, "slots"),
        ({"out": torch.zeros(2, 70, 4, 24)}, "out"),
        ({"initial_state": torch.zeros(3, 4, 24, 16)}, "initial_state"),
    ],
)
def test_what_the_functional_form_excludes_is_refused_by_name(change, named):
    leaves, options = Call("any").make(torch.float32)
    with pytest.raises(sluice.ContractError, match=f"prefill: {named}"):
        sluice.prefill(**{**leaves, **options, **change})


def test_a_state_that_is_not_used_has_no_cost_and_no_gradient():
    leaves, options = Call("any").make(torch.float32)
    _, final = sluice.prefill(**leaves, **options)
    dq, dS = torch.autograd.grad(final.sum(), [leaves["q"], leaves["initial_state"]])
    assert not dq.any()
    assert dS.any()


@pytest.mark.parametrize("way", ["eager", "compiled", "checkpoint", "layer"])
def test_a_final_state_that_is_not_used_has_no_gradient(way, layer):
    """Nor has a step from zero an initial state: on a GPU either would make the backward slower."""
    leaves, options = Call("any", state=False).make(torch.float32)

    def output(*x):
        return sluice.prefill(**dict(zip(leaves, x, strict=True)), **options)[0]

    def step():
        x = list(leaves.values())
        if way == "compiled":
            torch._dynamo.reset()
            torch.compile(output, fullgraph=True, backend="aot_eager")(*x).sum().backward()
        elif way == "checkpoint":
            checkpoint(output, *x, use_reentrant=True).sum().backward()
        elif way == "layer":
            layer(torch.randn(2, 12, 32)).sum().backward()
        else:
            output(*x).sum().backward()

    assert states_in_backward(step) == [set()]


def test_a_backward_is_told_of_the_states_that_a_call_uses():
    leaves, options = Call("any").make(torch.float32)

    def step():
        o, final = sluice.prefill(**leaves, **options)
        (o.sum() + final.sum()).backward()

    assert states_in_backward(step) == [{"state", "dfinal"}]
