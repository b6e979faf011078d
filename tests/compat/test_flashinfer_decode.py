"""FlashInfer's decode functions: states in place, pools of any stride, draft tokens, one step."""

from __future__ import annotations

import itertools

import pytest
import torch

from sluice.compat.flashinfer import (
    gated_delta_rule_decode,
    gated_delta_rule_decode_pretranspose,
    gated_delta_rule_mtp,
    gdn_fused_decode_step,
)
from sluice.contract.errors import ContractError
from sluice.testing import oracle
from sluice.testing.compare import FLOAT32_CPU, assert_same_bits, assert_within


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def close(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert_within(a, b, FLOAT32_CPU, name="o or state")


def draft(T, B=4):
    """q, k, v, then by name: raw gates."""
    qkv = drawn(B, T, 2, 8), drawn(B, T, 2, 8, seed=1), drawn(B, T, 4, 8, seed=2)
    names = {
        "A_log": drawn(4, seed=3),
        "a": drawn(B, T, 4, seed=4),
        "dt_bias": drawn(4, seed=5),
        "b": drawn(B, T, 4, seed=6),
    }
    return qkv, names


def expected_of(qkv, names, state, **options):
    gates = {"A_log": names["A_log"], "dt_bias": names["dt_bias"], "normalize_qk": True}
    return oracle.delta(*qkv, names["a"], names["b"], state=state, **{**gates, **options})[:2]


@pytest.mark.parametrize("T", [1, 3, 12])
def test_decode_in_place(T):
    qkv, names = draft(T)
    state = drawn(4, 4, 8, 8, seed=7)
    expected = expected_of(qkv, names, state)
    out = torch.empty(4, T, 4, 8, dtype=torch.bfloat16)
    o, same = gated_delta_rule_decode_pretranspose(*qkv, state.clone(), **names, output=out)
    assert o is out
    assert_within(out, expected[0], 4e-3, name="rounded")
    o, same = gated_delta_rule_decode_pretranspose(*qkv, state, **names)
    assert same is state
    close([o, state], expected)
    before = state.clone()
    options = {"scale": 0.5, "use_qk_l2norm": False, "disable_state_update": True}
    o, _ = gated_delta_rule_decode_pretranspose(*qkv, state, **names, **options)
    close([o], expected_of(qkv, names, before, scale=0.5, normalize_qk=False)[:1])
    assert_same_bits(state, before, "nothing written")


def test_decode_from_a_pool_with_padding_and_other_slots_to_write():
    qkv, names = draft(1)
    pool = drawn(9, 4, 8, 8, seed=8)
    before, read = pool.clone(), torch.tensor([7, -1, 0, 3])
    write = torch.tensor([1, 2, 0, -1])
    o, same = gated_delta_rule_decode_pretranspose(
        *qkv,
        None,
        **names,
        initial_state=pool,
        initial_state_indices=read,
        output_state_indices=write,
    )
    expected = expected_of(qkv, names, before[read.clamp(min=0)])
    assert same is pool
    close([o[[0, 2, 3]], pool[[1, 0]]], [expected[0][[0, 2, 3]], expected[1][[0, 2]]])
    assert not o[1].any()
    assert_same_bits(pool[2:], before[2:], "others")


@pytest.mark.parametrize("T", [2, 4, 12])
@pytest.mark.parametrize("frozen", [True, False])
def test_draft_tokens_with_their_states(T, frozen):
    qkv, names = draft(T)
    pool, read = drawn(9, 4, 8, 8, seed=8), torch.tensor([7, -1, 0, 3])
    before, live = pool.clone(), [0, 2, 3]
    buffer = torch.full((5, T + 1, 4, 8, 8), 9.0)
    o, _ = gated_delta_rule_mtp(
        *qkv,
        pool,
        read,
        **names,
        intermediate_states_buffer=buffer,
        disable_state_update=frozen,
    )
    start = before[read.clamp(min=0)]
    for t in range(T):
        part = [x[:, : t + 1] for x in qkv]
        cut = {**names, "a": names["a"][:, : t + 1], "b": names["b"][:, : t + 1]}
        state = expected_of(part, cut, start)[1]
        close([buffer[live, t]], [state[live]])
    close([o[live]], [expected_of(qkv, names, start)[0][live]])
    assert (buffer[1] == 9).all()
    assert (buffer[4] == 9).all()
    assert (buffer[:, T] == 9).all()
    rows = [i for i in range(9) if frozen or i not in (7, 0, 3)]
    assert_same_bits(pool[rows], before[rows], "others")
    if not frozen:
        close([pool[read[live]]], [state[live]])


def test_a_state_of_16_bits_is_carried_unrounded_through_draft_tokens():
    qkv, names = draft(4)
    pool, read = drawn(9, 4, 8, 8, seed=8).bfloat16(), torch.tensor([7, -1, 0, 3])
    outputs = []
    for state in (pool.float(), pool):
        buffer = state.new_empty(4, 4, 4, 8, 8)
        options = {"intermediate_states_buffer": buffer, "disable_state_update": False}
        outputs.append(gated_delta_rule_mtp(*qkv, state, read, **names, **options)[0][[0, 2, 3]])
        final = buffer[[0, 2, 3], -1]
        assert_same_bits(state[read[[0, 2, 3]]], final, "the last state")
    assert_same_bits(*outputs, "o")


@pytest.mark.parametrize("T", [4, 12])
def test_states_in_a_buffer_have_the_bits_of_those_in_the_pool(T):
    """Upstream demands it; on a CPU, tokens one by one may round differently from one call."""
    q, k = (drawn(2, T, 2, 128, seed=i) for i in range(2))
    qkv, names = (q, k, drawn(2, T, 4, 128, seed=2)), draft(T, B=2)[1]
    pool, read = drawn(2 + 2 * T, 4, 128, 128, seed=8), torch.arange(2)
    to = torch.arange(2, 2 + 2 * T).view(2, T)
    buffer, states = pool.new_empty(2, T, 4, 128, 128), []
    for kept in ({"intermediate_states_buffer": buffer}, {"ssm_state_indices": to}):
        states.append(pool.clone())
        gated_delta_rule_mtp(*qkv, states[-1], read, **names, **kept, disable_state_update=False)
    assert_same_bits(buffer, states[1][to], "states")
    assert_same_bits(states[0][:2], buffer[:, -1], "the last state")


def test_each_token_s_state_into_the_pool():
    T, qkv_names = 3, draft(3)
    qkv, names = qkv_names
    pool, read = drawn(20, 4, 8, 8, seed=8), torch.tensor([1, 2, 3, -1])
    before = pool.clone()
    to = torch.tensor([[4, 5, 6], [7, -1, 9], [10, 11, 12], [13, 14, 15]], dtype=torch.int32)
    options = {"ssm_state_indices": to, "disable_state_update": False}
    gated_delta_rule_mtp(*qkv, pool, read, **names, **options)
    for t, i in itertools.product(range(T), range(3)):
        part = [x[i : i + 1, : t + 1] for x in qkv]
        cut = {**names, **{n: names[n][i : i + 1, : t + 1] for n in "ab"}}
        if to[i, t] >= 0:
            state = expected_of(part, cut, before[read[i : i + 1]])[1]
            close([pool[to[i, t]]], [state[0]])
    rest = [0, 1, 2, 3, 8, 13, 14, 15, 16]  # what was read stays too
    assert_same_bits(pool[rest], before[rest], "others")


def test_decode_refuses_by_name():
    qkv, names = draft(2)
    pool, read = drawn(9, 4, 8, 8), torch.arange(4)
    mtp = (*qkv, pool, read)
    for options in (
        {"cache_replayssm": True},
        {"replayssm_rawv": pool},
        {"replayssm_rawk": pool},
        {"replayssm_g": pool},
        {"replayssm_beta": pool},
        {"intermediate_states_buffer": torch.zeros(3, 2, 4, 8, 8)},
        {"ssm_state_indices": torch.zeros(4, 1, dtype=torch.int32)},
        {"output": torch.zeros(4, 2, 4, 4)},
    ):
        (argument,) = options
        with pytest.raises(ContractError, match=f"gated_delta_rule_mtp: {argument}: expected"):
            gated_delta_rule_mtp(*mtp, **names, disable_state_update=False, **options)
    with pytest.warns(FutureWarning, match="disable_state_update"):
        gated_delta_rule_mtp(*mtp, **names)
    one = gated_delta_rule_decode_pretranspose
    for argument, state, options in (
        ("backend", pool, {"backend": "rubin"}),
        ("output", pool[:4], {"output": torch.zeros(4, 2, 4, 4)}),
        ("state", pool, {"initial_state": pool, "initial_state_indices": read}),
        ("initial_state_indices", None, {"initial_state": pool}),
        ("output_state_indices", pool[:4], {"output_state_indices": read}),
    ):
        with pytest.raises(ContractError, match=f"pretranspose: {argument}: expected"):
            one(*qkv, state, **names, **options)
    with pytest.raises(ContractError, match="gated_delta_rule_decode: backend: expected"):
        gated_delta_rule_decode(*qkv, pool[:4], **names, backend="cake_gdn")


@pytest.mark.parametrize("T", [1, 3, 12])
@pytest.mark.parametrize("strided", [False, True])
def test_decode_of_states_with_v_last(T, strided):
    qkv, names = draft(T)
    qkv = (drawn(4, T, 2, 6), drawn(4, T, 2, 6, seed=1), qkv[2])  # K = 6, V = 8
    state = drawn(4, 4, 8, 6, seed=7)
    expected = expected_of(qkv, names, state)
    kv = state.mT if strided else state.mT.contiguous()
    o, same = gated_delta_rule_decode(*qkv, kv, **names, backend="flashinfer")
    assert same is kv
    close([o, kv.mT], expected)
    options = {"scale": 0.5, "use_qk_l2norm": False, "output": torch.empty(4, T, 4, 8).double()}
    before = kv.mT.clone()
    o, _ = gated_delta_rule_decode(*qkv, kv, **names, **options)
    assert o is options["output"]
    close([o], expected_of(qkv, names, before, scale=0.5, normalize_qk=False)[:1])


@pytest.mark.parametrize("how", ["page", "heads", "inner"])
@pytest.mark.parametrize("mode", ["plain", "buffer", "per token", "frozen", "elsewhere"])
def test_pools_of_any_stride_give_the_bits_of_a_contiguous_one(how, mode):
    T, (qkv, names) = 3, draft(3)
    read = torch.tensor([0, 7, -1, 3])  # slot 0, then padding
    memory = drawn(20, 8, 8, 16, seed=8)
    cut = {"page": (4, 8), "heads": (slice(None, None, 2), 8), "inner": (4, slice(None, None, 2))}
    heads, inner = cut[how]
    heads = slice(heads) if isinstance(heads, int) else heads
    inner = slice(inner) if isinstance(inner, int) else inner
    if how == "page":
        memory = memory[..., :8].contiguous()
    pool = memory[:, heads, :, inner]
    dense, before = pool.contiguous(), memory.clone()
    options = [{"disable_state_update": mode == "frozen"} for _ in range(2)]
    if mode == "buffer":
        for x in options:
            x["intermediate_states_buffer"] = torch.zeros(4, T, 4, 8, 8)
    if mode == "per token":
        for x in options:
            x["ssm_state_indices"] = torch.arange(8, 20, dtype=torch.int32).view(4, 3)
    if mode == "elsewhere":
        for x in options:
            x["output_state_indices"] = torch.tensor([9, -1, 8, 10])
    o, same = gated_delta_rule_mtp(*qkv, pool, read, **names, **options[0])
    expected, _ = gated_delta_rule_mtp(*qkv, dense, read, **names, **options[1])
    assert same is pool
    assert_same_bits(o, expected, "o")
    assert_same_bits(pool, dense, "states")
    assert mode == "frozen" or not torch.equal(memory, before)
    memory[:, heads, :, inner] = before[:, heads, :, inner]
    assert_same_bits(memory, before, "what lies between the states")


def test_all_rows_padded_write_nothing():
    qkv, names = draft(2)
    pool = drawn(5, 4, 8, 16, seed=8)[..., ::2]
    before = pool.clone()
    read = torch.full((4,), -1)
    o, _ = gated_delta_rule_mtp(*qkv, pool, read, **names, disable_state_update=False)
    assert not o.any()
    assert_same_bits(pool, before, "pool")


def test_padded_rows_of_an_output_stay_in_mtp_and_are_zeros_in_decode():
    qkv, names = draft(2)
    read = torch.tensor([1, -1, 0, 3])
    for dtype in (torch.float32, torch.float64):
        pool, out = drawn(4, 4, 8, 8, seed=8), torch.full((4, 2, 4, 8), 42.0, dtype=dtype)
        expected = expected_of(qkv, names, pool[read.clamp(min=0)])[0]
        options = {"disable_state_update": True, "output": out}
        o, _ = gated_delta_rule_mtp(*qkv, pool, read, **names, **options)
        assert o is out
        close([o[read >= 0]], [expected[read >= 0]])
        assert (o[1] == 42).all()
        o, _ = gated_delta_rule_decode_pretranspose(
            *(*qkv, None), **names, initial_state=pool, initial_state_indices=read, output=out
        )
        assert o is out
        assert not o[1].any()


@pytest.mark.parametrize("order", ["columns last", "channels last"])
@pytest.mark.parametrize("given", [False, True])
def test_fused_step(order, given):
    B, P, HK, HV, K, V, W = 3, 5, 2, 4, 8, 6, 4
    D = 2 * HK * K + HV * V
    hidden, w_ba, qkv = drawn(B, 10), drawn(10, 2 * HV, seed=1), drawn(B, D, seed=2)
    weight, bias, A_log, dt_bias = drawn(D, W, seed=3), drawn(D), drawn(HV), drawn(HV, seed=1)
    conv = drawn(P, D, W - 1, seed=4)
    conv = conv if order == "columns last" else conv.mT.contiguous().mT
    state, slots = drawn(P, HV, V, K, seed=5), torch.tensor([3, -1, 0], dtype=torch.int32)
    ba = (hidden @ w_ba).unsqueeze(1)
    raw = {"a": ba[..., HV:], "b": ba[..., :HV], "A_log": A_log, "dt_bias": dt_bias}
    made, window = oracle.conv_qkv(
        qkv.unsqueeze(1), weight, bias, num_k_heads=HK, num_v_heads=HV, head_k_dim=K,
        head_v_dim=V, normalize_qk=given, state=conv, slots=slots, **raw,
    )  # fmt: skip
    scale = 0.3 if given else 0.0  # 0.0: the default
    exact = oracle.delta(*made, state=state, slots=slots, scale=scale or None)[:2]
    out = torch.empty(B, 1, HV, V) if given else None
    pools = conv.clone(), state.clone()
    gates = (A_log, dt_bias, scale)
    o, conv_after, state_after = gdn_fused_decode_step(
        hidden, w_ba, qkv, weight, bias, pools[0], *gates, pools[1], slots, given, out
    )
    assert conv_after is pools[0]
    assert state_after is pools[1]
    assert out is None or o is out
    close([o, *pools], [exact[0], window, exact[1]])
    before = [x.clone() for x in pools]
    for argument, bad in (
        ("w_ba", {"w_ba": w_ba[:, 1:]}),
        ("mixed_qkv", {"mixed_qkv": qkv[:, 1:]}),
        ("out", {"out": torch.empty(B, HV, V)}),
        ("out", {"out": torch.empty(B, 1, HV, V, dtype=torch.float16)}),
    ):
        call = {"hidden_states": hidden, "w_ba": w_ba, "mixed_qkv": qkv, "conv_weight": weight}
        call |= {"conv_bias": bias, "conv_state": pools[0], "A_log": A_log, "dt_bias": dt_bias}
        call |= {"scale": None, "ssm_state": pools[1], "state_indices": slots, **bad}
        with pytest.raises(ContractError, match=f"gdn_fused_decode_step: {argument}: expected"):
            gdn_fused_decode_step(**call)
    assert_same_bits(
        torch.cat([x.flatten() for x in pools]), torch.cat([x.flatten() for x in before]), "pools"
    )
