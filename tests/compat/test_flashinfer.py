"""FlashInfer's functions: linear gates, pools, checkpoints, draft tokens; nothing ignored."""

from __future__ import annotations

import itertools

import pytest
import torch

from sluice.compat.flashinfer import (
    chunk_gated_delta_rule,
    gated_delta_rule_decode_pretranspose,
    gated_delta_rule_mtp,
)
from sluice.contract.errors import ContractError
from sluice.testing import oracle
from sluice.testing.compare import FLOAT32_CPU, assert_same_bits, assert_within

BORDERS = torch.tensor([0, 150, 150, 200])


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def close(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert_within(a, b, FLOAT32_CPU, name="o or state")


def packed(HQ=2, HK=2, HV=4):
    """q, k, v, log decay, beta, states of three sequences, the second empty."""
    H = max(HQ, HV)
    q, k, v = drawn(200, HQ, 8), drawn(200, HK, 8, seed=1), drawn(200, HV, 8, seed=2)
    k = torch.nn.functional.normalize(k, dim=-1)
    g = -drawn(200, H, seed=3).abs() * 0.1
    return q, k, v, g, drawn(200, H, seed=4).sigmoid(), drawn(3, H, 8, 8, seed=5)


def test_gates_in_linear_space_row_20():
    q, k, v, g, beta, S = packed()
    before = S.clone()
    o, final = chunk_gated_delta_rule(
        q, k, v, g.exp(), beta, None, S, output_final_state=True, cu_seqlens=BORDERS
    )
    expected = oracle.delta(q, k, v, g, beta, state=S, cu_seqlens=BORDERS)[:2]
    close([o, final], expected)
    assert torch.equal(S, before)
    alone = chunk_gated_delta_rule(q, k, v, g.exp(), beta, initial_state=S, cu_seqlens=BORDERS)
    assert_same_bits(alone, o, "o alone, not a tuple")
    with pytest.raises(ContractError, match="g: expected decays in linear space"):
        chunk_gated_delta_rule(q, k, v, g, beta, cu_seqlens=BORDERS)


def test_defaults_norm_scale_and_a_decay_of_zero():
    q, k, v, g, beta, _ = packed()
    ones = torch.ones_like(beta)
    o = chunk_gated_delta_rule(
        q, k, v, scale=0.0, use_qk_l2norm_in_kernel=True, cu_seqlens=BORDERS, max_seqlen=150
    )
    expected = oracle.delta(q, k, v, None, ones, normalize_qk=True, cu_seqlens=BORDERS)
    close([o], expected[:1])
    alpha = g.exp()
    alpha[60] = 0  # forgets everything there
    out = torch.empty(200, 4, 8)
    o = chunk_gated_delta_rule(q, k, v, alpha, beta, 0.7, cu_seqlens=BORDERS, output=out)
    assert o is out
    close([o], oracle.delta(q, k, v, alpha.log(), beta, scale=0.7, cu_seqlens=BORDERS)[:1])


def test_more_query_than_value_heads_have_states_of_their_own():
    q, k, v, g, beta, S = packed(HQ=4, HK=2, HV=2)
    o, final = chunk_gated_delta_rule(
        q, k, v, g.exp(), beta, None, S, output_final_state=True, cu_seqlens=BORDERS
    )
    k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
    close([o, final], oracle.delta(q, k, v, g, beta, state=S, cu_seqlens=BORDERS)[:2])


@pytest.mark.parametrize("same", [True, False], ids=["in place", "to another pool"])
def test_pools(same):
    q, k, v, g, beta, _ = packed()
    pool, slots = drawn(9, 4, 8, 8, seed=6), torch.tensor([7, 2, 0], dtype=torch.int32)
    before = pool.clone()
    target = pool if same else drawn(9, 4, 8, 8, seed=7)
    untouched = target.clone()
    o, final = chunk_gated_delta_rule(
        q,
        k,
        v,
        g.exp(),
        beta,
        initial_state=pool,
        output_final_state=True,
        output_state=target,
        cu_seqlens=BORDERS,
        state_indices=slots,
    )
    assert final is target
    expected = oracle.delta(q, k, v, g, beta, state=before[slots.long()], cu_seqlens=BORDERS)
    close([o, target[[7, 0]]], [expected[0], expected[1][[0, 2]]])
    others = [1, 2, 3, 4, 5, 6, 8]  # 2 is the empty sequence's
    assert_same_bits(target[others], untouched[others], "other rows")
    assert same or torch.equal(pool, before)
    with pytest.raises(ContractError, match="output_state: expected the pool"):
        chunk_gated_delta_rule(
            q,
            k,
            v,
            initial_state=pool,
            output_final_state=True,
            cu_seqlens=BORDERS,
            state_indices=slots,
        )


def test_an_output_state_keeps_the_rows_of_empty_sequences():
    q, k, v, g, beta, S = packed()
    out = torch.full((3, 4, 8, 8), 5.0, dtype=torch.bfloat16)
    chunk_gated_delta_rule(q, k, v, g.exp(), beta, None, S, True, BORDERS, output_state=out)
    exact = oracle.delta(q, k, v, g, beta, state=S, cu_seqlens=BORDERS)[1]
    assert (out[1] == 5).all()
    assert_within(out[[0, 2]], exact[[0, 2]], 4e-3, name="rounded to bfloat16")


def test_checkpoints():
    q, k, v, g, beta, S = packed()
    kept, starts = torch.zeros(2, 4, 8, 8), torch.tensor([0, 2, 2, 2])
    options = {"checkpoint_every_n_tokens": 64, "checkpoint_cu_starts": starts}
    o, final = chunk_gated_delta_rule(
        q, k, v, g.exp(), beta, None, S, True, BORDERS, state_checkpoints=kept, **options
    )
    close([o, final], oracle.delta(q, k, v, g, beta, state=S, cu_seqlens=BORDERS)[:2])
    for i, n in enumerate((64, 128)):
        part = [x[:n].unsqueeze(0) for x in (q, k, v, g, beta)]
        close([kept[i : i + 1]], oracle.delta(*part, state=S[:1])[1:2])
    with pytest.raises(ContractError, match="state_checkpoints: expected a tensor"):
        chunk_gated_delta_rule(q, k, v, cu_seqlens=BORDERS, **options)


def test_prefill_refuses_by_name():
    q, k, v, _, beta, S = packed()
    for options in (
        {"use_cp": True},
        {"backend": "cudnn"},
        {"_cp_chunk_len": 64},
        {"checkpoint_every_n_tokens": 32},
        {"state_checkpoints": S},
        {"checkpoint_cu_starts": BORDERS},
        {"max_seqlen": 100},
        {"initial_state": S[:2]},
        {"beta": beta[:, :2]},
        {"cu_seqlens": None},
    ):
        (argument,) = options
        with pytest.raises(ContractError, match=f"chunk_gated_delta_rule: {argument}: expected"):
            chunk_gated_delta_rule(q, k, v, **{"cu_seqlens": BORDERS, **options})


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


@pytest.mark.parametrize("T", [2, 4])
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
        ("state", pool, {"initial_state": pool, "initial_state_indices": read}),
        ("initial_state_indices", None, {"initial_state": pool}),
        ("output_state_indices", pool[:4], {"output_state_indices": read}),
    ):
        with pytest.raises(ContractError, match=f"pretranspose: {argument}: expected"):
            one(*qkv, state, **names, **options)
