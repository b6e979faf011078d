"""FLA's functions: upstream's signatures, every option honoured or refused, the exact results."""

from __future__ import annotations

import importlib.metadata
import inspect

import pytest
import torch

from sluice.compat import fla
from sluice.contract.errors import ContractError
from sluice.testing import oracle
from sluice.testing.compare import FLOAT32_CPU, assert_same_bits, assert_within


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def call(per_key=False, B=2, T=70, N=None):
    """q, k, v, raw g, raw beta, S: two key heads, four value heads."""
    made = drawn(B, T, 2, 8), drawn(B, T, 2, 8, seed=1), drawn(B, T, 4, 6, seed=2)
    g = drawn(B, T, 4, *([8] if per_key else []), seed=3)
    return *made, g, drawn(B, T, 4, seed=4), drawn(N or B, 4, 8, 6, seed=5)


def exact(q, k, v, g, beta, S, **options):
    return oracle.delta(q, k, v, g, beta, state=S, state_layout="kv", **options)[:2]


def close(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert_within(a, b, FLOAT32_CPU, name="o or state")


RULES = {
    "chunk_gated_delta_rule": False,
    "fused_recurrent_gated_delta_rule": False,
    "chunk_kda": True,
    "fused_recurrent_kda": True,
}
COMMON = {"output_final_state": True}


@pytest.fixture(params=list(RULES))
def rule(request):
    """A function, and a call for it with activated gates."""
    q, k, v, g, b, S = call(RULES[request.param])
    return getattr(fla, request.param), (q, k, v), {"g": -g.abs(), "beta": b.sigmoid()}, S


def test_signatures_are_upstream_s():
    """Read from the installed fla-core without importing it, which needs Triton."""
    ast = pytest.importorskip("ast")
    try:
        files = importlib.metadata.files("fla-core") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("needs fla-core")
    places = {
        "chunk_gated_delta_rule": "fla/ops/gated_delta_rule/chunk.py",
        "fused_recurrent_gated_delta_rule": "fla/ops/gated_delta_rule/fused_recurrent.py",
        "chunk_kda": "fla/ops/kda/chunk.py",
        "fused_recurrent_kda": "fla/ops/kda/fused_recurrent.py",
        "causal_conv1d": "fla/modules/causal_conv1d/ops.py",
        "causal_conv1d_update": "fla/modules/causal_conv1d/ops.py",
    }
    for name, place in places.items():
        (path,) = (f.locate() for f in files if str(f) == place)
        tree = ast.parse(path.read_text(encoding="utf-8"))
        (node,) = (n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name)
        upstream = [a.arg for a in node.args.args]
        defaults = [ast.literal_eval(d) for d in node.args.defaults]
        ours = list(inspect.signature(getattr(fla, name)).parameters.values())
        ours = [p for p in ours if p.kind is not p.VAR_KEYWORD]
        assert [p.name for p in ours] == upstream, name
        assert [p.default for p in ours][len(ours) - len(defaults) :] == defaults, name


def test_the_exact_results(rule):
    function, qkv, gates, S = rule
    before = S.clone()
    found = function(*qkv, **gates, initial_state=S, **COMMON)
    close(found, exact(*qkv, *gates.values(), S))
    assert torch.equal(S, before)  # never in place
    o, none = function(*qkv, **gates)
    assert none is None
    close([o], exact(*qkv, *gates.values(), None)[:1])


def test_mixed_dtypes_give_the_dtype_of_the_values(rule):
    function, (q, k, v), gates, _ = rule
    o, _ = function(q, k, v.half(), **gates)
    assert o.dtype == torch.float16
    assert_same_bits(o, function(q, k, v.half().float(), **gates)[0].half(), "o")


@pytest.mark.parametrize("old", [False, True], ids=["state_v_first", "transpose_state_layout"])
def test_state_v_first(rule, old):
    function, qkv, gates, S = rule
    first = function(*qkv, **gates, initial_state=S, **COMMON)
    options = {"transpose_state_layout": True} if old else {"state_v_first": True}
    if old:
        with pytest.warns(DeprecationWarning, match="state_v_first"):
            found = function(*qkv, **gates, initial_state=S.mT, **COMMON, **options)
        with pytest.raises(ContractError, match="transpose_state_layout"):
            function(*qkv, **gates, state_v_first=True, transpose_state_layout=True)
    else:
        found = function(*qkv, **gates, initial_state=S.mT, **COMMON, **options)
    close([found[0], found[1].mT], first)


def test_scale_and_norm(rule):
    function, qkv, gates, S = rule
    options = {"scale": 0.3, "use_qk_l2norm_in_kernel": True}
    found = function(*qkv, **gates, initial_state=S, **COMMON, **options)
    close(found, exact(*qkv, *gates.values(), S, scale=0.3, normalize_qk=True))


@pytest.mark.parametrize("raw_gate", [False, True])
@pytest.mark.parametrize("raw_beta", [False, True])
@pytest.mark.parametrize("name", list(RULES))
def test_gates_activated_inside(name, raw_gate, raw_beta):
    per_key = RULES[name]
    q, k, v, g, b, S = call(per_key)
    A_log, dt_bias = drawn(4, seed=6), drawn(4, *([8] if per_key else []), seed=7)
    G, BETA = oracle.raw_gates(g, b, A_log, dt_bias, raw_beta, per_key=per_key)
    options = {"initial_state": S, **COMMON}
    if raw_gate:
        options |= {"use_gate_in_kernel": True, "A_log": A_log, "dt_bias": dt_bias.flatten()}
    if raw_beta:
        options |= {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True}
    given = g if raw_gate else G.float(), b if raw_beta else BETA.float()
    found = getattr(fla, name)(q, k, v, g=given[0], beta=given[1], **options)
    close(found, exact(q, k, v, G, BETA, S))


@pytest.mark.parametrize("with_A", [True, False])
@pytest.mark.parametrize("name", ["chunk_kda", "fused_recurrent_kda"])
def test_a_bounded_gate(name, with_A):
    q, k, v, g, b, S = call(per_key=True)
    A_log, dt_bias = drawn(4, seed=6), drawn(32, seed=7)
    rate = A_log.exp().view(4, 1) if with_A else 1
    G = -5 * (rate * (g + dt_bias.view(4, 8))).sigmoid()
    options = {"use_gate_in_kernel": True, "A_log": A_log if with_A else None, "dt_bias": dt_bias}
    if name == "chunk_kda":
        options["safe_gate"] = True
    found = getattr(fla, name)(
        q, k, v, g, b.sigmoid(), initial_state=S, lower_bound=-5.0, **options, **COMMON
    )
    close(found, exact(q, k, v, G, b.sigmoid(), S))


def test_gates_that_break_their_promised_bound_are_refused():
    q, k, v, g, b, _ = call(per_key=True)
    g = -g.abs().clamp(max=5.0)
    options = {"beta": b.sigmoid(), "safe_gate": True, "lower_bound": -5.0, **COMMON}
    fla.chunk_kda(q, k, v, g, **options)
    g[1, 3, 2, 1] = -6.0
    with pytest.raises(ContractError, match="g: expected gates of at least lower_bound"):
        fla.chunk_kda(q, k, v, g, **options)


def test_packed_sequences(rule):
    function, _, _, _ = rule
    per_key = RULES[function.__name__]
    q, k, v, g, b, S = call(per_key, B=1, N=3)
    gates = {"g": -g.abs(), "beta": b.sigmoid()}
    borders = torch.tensor([0, 5, 5, 70])
    found = function(q, k, v, **gates, initial_state=S, cu_seqlens=borders, **COMMON)
    close(found, exact(q, k, v, *gates.values(), S, cu_seqlens=borders))
    with pytest.raises(ContractError, match="initial_state: expected 3 states"):
        function(q, k, v, **gates, initial_state=S[:2], cu_seqlens=borders)
    q, k, v, g, b, _ = call(per_key)
    with pytest.raises(ContractError, match="q: expected a batch of 1"):
        function(q, k, v, g=g, beta=b, cu_seqlens=borders)


def test_a_recurrent_call_of_one_token_and_its_optional_gates():
    q, k, v, _, b, S = call(T=1)
    function = fla.fused_recurrent_gated_delta_rule
    ones = torch.ones(2, 1, 4)
    close(function(q, k, v, initial_state=S, **COMMON), exact(q, k, v, None, ones, S))
    gk = -drawn(2, 1, 4, 8, seed=8).abs()
    g = -drawn(2, 1, 4, seed=9).abs()
    found = function(q, k, v, g, gk, None, b.sigmoid(), initial_state=S, **COMMON)
    close(found, exact(q, k, v, gk + g.unsqueeze(-1), b.sigmoid(), S))
    A_log = drawn(4, seed=6)
    raw = {"use_gate_in_kernel": True, "A_log": A_log, "use_beta_sigmoid_in_kernel": True}
    found = function(q, k, v, g, gk, None, b, initial_state=S, **raw, **COMMON)
    G, BETA = oracle.raw_gates(g, b, A_log, None)
    close(found, exact(q, k, v, gk + G.unsqueeze(-1), BETA, S))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("v_first", [False, True])
def test_states_before_each_chunk(packed, v_first):
    q, k, v, g, b, S = call(per_key=True, B=1 if packed else 2, N=2)
    g, b = -g.abs(), b.sigmoid()
    borders = torch.tensor([0, 33, 70]) if packed else None
    given = S.mT.contiguous() if v_first else S
    options = {"initial_state": given, "state_v_first": v_first, "cu_seqlens": borders}
    with torch.inference_mode():
        o, final, h = fla.chunk_kda(
            q, k, v, g, b, **options, **COMMON, chunk_size=32, return_intermediate_states=True
        )
    close([o, final.mT if v_first else final], exact(q, k, v, g, b, S, cu_seqlens=borders))
    spans = [(0, 0, 33), (0, 33, 70)] if packed else [(0, 0, 70), (1, 0, 70)]
    expected = []
    for n, (row, start, stop) in enumerate(spans):
        for at in range(start, stop, 32):
            part = [x[row : row + 1, start:at] for x in (q, k, v, g, b)]
            state = S[n : n + 1] if at == start else exact(*part, S[n : n + 1])[1]
            expected.append(state.mT if v_first else state)
    expected = torch.cat(expected).to(torch.bfloat16)
    assert h.shape[:2] == ((1, 4) if packed else (2, 3))
    assert_within(h.flatten(0, 1), expected, 4e-3, name="h")
    with pytest.raises(ContractError, match="return_intermediate_states"):
        fla.chunk_kda(q, k, v, g, b, return_intermediate_states=True)


def test_a_graph_s_borders():
    q, k, v, g, b, S = call(per_key=True, B=1, N=4)
    g, b, borders = -g.abs(), b.sigmoid(), torch.tensor([0, 33, 70, 70, 70])
    options = {"initial_state": S, "cu_seqlens": borders, **COMMON}
    found = fla.chunk_kda(q, k, v, g, b, use_graph=True, max_num_seqs=4, **options)
    for a, b_ in zip(found, fla.chunk_kda(q, k, v, g, b, **options), strict=True):
        assert_same_bits(a, b_, "use_graph")
    with pytest.raises(ContractError, match="max_num_seqs"):
        fla.chunk_kda(q, k, v, g, b, use_graph=True, max_num_seqs=5, **options)
    with pytest.raises(ContractError, match="use_graph: expected False with gradients"):
        fla.chunk_kda(q.requires_grad_(), k, v, g, b, use_graph=True, **options)


def test_what_is_not_served_is_refused_by_name(rule):
    function, qkv, gates, _ = rule
    name = function.__name__
    refused = [{"head_first": True}, {"new_option": 1}, {"allow_neg_eigval": True}]
    refused += [{"A_log": torch.zeros(4)}, {"dt_bias": torch.zeros(4)}]
    if name.startswith("chunk"):
        refused += [{"cp_context": object()}, {"chunk_size": 48}]
    if name == "chunk_gated_delta_rule":
        refused.append({"chunk_indices": torch.zeros(2, 2)})
    if name == "fused_recurrent_gated_delta_rule":
        refused += [{"gv": torch.zeros(2, 70, 4, 6)}, {"gk": torch.zeros(2, 70, 4, 3)}]
    if name == "chunk_kda":
        refused += [{"max_num_seqs": 2}, {"initial_state": torch.zeros(2, 4, 8, 6).half()}]
    if "kda" in name:
        refused.append({"lower_bound": -5.0})
    for options in refused:
        (argument,) = options
        with pytest.raises(ContractError, match=f"{name}: {argument}: expected"):
            function(*qkv, **gates, **options)


def test_given_chunks_must_be_those_of_the_borders():
    q, k, v, g, b, _ = call(B=1)
    borders = torch.tensor([0, 5, 70])
    plan = torch.tensor([[0, 0], [1, 0], [1, 1]])
    options = {"cu_seqlens": borders, "chunk_indices": plan}
    one = fla.chunk_gated_delta_rule(q, k, v, -g.abs(), b.sigmoid(), **options)[0]
    two = fla.chunk_gated_delta_rule(q, k, v, -g.abs(), b.sigmoid(), cu_seqlens=borders)[0]
    assert_same_bits(one, two, "chunk_indices")
    with pytest.raises(ContractError, match="chunk_indices: expected the chunks of 32 tokens"):
        fla.chunk_gated_delta_rule(q, k, v, -g.abs(), b.sigmoid(), chunk_size=32, **options)


@pytest.mark.parametrize("W", [2, 4, 6])
@pytest.mark.parametrize("packed", [False, True])
def test_causal_conv1d(W, packed):
    x, weight, bias = drawn(1 if packed else 2, 20, 5), drawn(5, W), drawn(5)
    borders = torch.tensor([0, 2, 20]) if packed else None
    state, residual = drawn(2, 5, W), drawn(*x.shape, seed=1)
    before = state.clone()
    y, final = fla.causal_conv1d(
        x, weight, bias, residual, state, True, activation="swish", cu_seqlens=borders
    )
    exact_y, exact_state = oracle.conv(x, weight, bias, state=state, cu_seqlens=borders)[:2]
    close([y, final], [exact_y + residual, exact_state])
    assert torch.equal(state, before)
    y, none = fla.causal_conv1d(x.view(*x.shape[:2], 5, 1), weight)
    assert none is None
    close([y.flatten(2)], oracle.conv(x, weight, activation=None)[:1])


@pytest.mark.parametrize("W", [3, 5])
def test_causal_conv1d_update_in_place(W):
    x, weight, cache = drawn(3, 5), drawn(5, W), drawn(3, 5, W)
    exact_y, exact_state = oracle.conv(x.unsqueeze(1), weight, state=cache)[:2]
    for given in (x, x.unsqueeze(0), x.unsqueeze(1)):
        kept = cache.clone()
        y, same = fla.causal_conv1d_update(given, kept, given, weight, activation="silu")
        assert same is kept
        close([y.view(3, 5), kept], [exact_y.squeeze(1) + x, exact_state])


def test_causal_conv1d_refuses_by_name():
    x, weight = drawn(1, 20, 5), drawn(5, 4)
    for options in (
        {"cp_context": object()},
        {"chunk_indices": torch.zeros(1, 2)},
        {"backend": "cuda"},
        {"activation": "gelu"},
        {"seq_idx": torch.zeros(1, 20)},
        {"initial_state": torch.zeros(1, 5, 3)},
    ):
        (argument,) = options
        with pytest.raises(ContractError, match=f"causal_conv1d: {argument}: expected"):
            fla.causal_conv1d(x, weight, **options)
    with pytest.raises(ContractError, match="weight"):
        fla.causal_conv1d(x)
