"""FlashInfer's prefill: linear gates, pools of any stride, checkpoints, plans; nothing ignored."""

from __future__ import annotations

import pytest
import torch

from sluice import ops
from sluice.compat.flashinfer import chunk_gated_delta_rule
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
    with pytest.raises(ContractError, match="expected an explicit output_state pool"):
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


@pytest.mark.parametrize("use_cp", ["auto", True, False])
@pytest.mark.parametrize("cut", [None, 64])
def test_use_cp_and_a_chunk_length_are_plans(use_cp, cut, monkeypatch):
    q, k, v, g, beta, S = packed()
    seen, prefill = [], ops.prefill

    def spy(*args, **options):
        seen.append(options["batch_invariant"])
        return prefill(*args, **options)

    monkeypatch.setattr(ops, "prefill", spy)
    options = {"use_cp": use_cp, "_cp_chunk_len": cut, "backend": "flashinfer"}
    found = chunk_gated_delta_rule(q, k, v, g.exp(), beta, None, S, True, BORDERS, **options)
    close(found, oracle.delta(q, k, v, g, beta, state=S, cu_seqlens=BORDERS)[:2])
    assert seen == [use_cp is False or cut is not None]


@pytest.mark.parametrize("every", [64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_is_the_state_of_a_call_that_ended_there(every, dtype):
    q, k, v, g, beta, S = packed()
    q, k, v = (x.to(dtype) for x in (q, k, v))
    borders, lengths = torch.tensor([0, 136, 200]), (136, 64)
    counts = [n // every for n in lengths]
    kept = torch.full((sum(counts), 4, 8, 8), float("nan"))
    chunk_gated_delta_rule(
        *(q, k, v, g.exp(), beta, None, S[:2], False, borders),
        state_checkpoints=kept,
        checkpoint_cu_starts=torch.tensor([0, counts[0], sum(counts)]),
        checkpoint_every_n_tokens=every,
        use_cp=False,
    )
    alone = []
    for i, start in enumerate((0, 136)):
        for j in range(1, counts[i] + 1):
            part = [x[start : start + j * every] for x in (q, k, v, g.exp(), beta)]
            ends = torch.tensor([0, j * every])
            options = {"cu_seqlens": ends, "use_cp": False, "output_final_state": True}
            alone.append(chunk_gated_delta_rule(*part, None, S[i : i + 1], **options)[1])
    assert_same_bits(kept, torch.cat(alone), "checkpoints")


def test_checkpoints_of_a_bfloat16_pool_are_not_rounded_to_bfloat16():
    q, k, v, g, beta, S = packed()
    pool = S.to(torch.bfloat16)
    kept, starts = torch.zeros(2, 4, 8, 8), torch.tensor([0, 2, 2, 2])
    exact = oracle.delta(*(x[:64].unsqueeze(0) for x in (q, k, v, g, beta)), state=pool[:1])[1]
    chunk_gated_delta_rule(
        *(q, k, v, g.exp(), beta, None, pool, True, BORDERS),
        output_state=pool,
        state_checkpoints=kept,
        checkpoint_cu_starts=starts,
        checkpoint_every_n_tokens=64,
    )
    close([kept[:1]], [exact])


STRIDED = {
    "page": lambda n: torch.zeros(n, 5, 8, 8)[:, :4],
    "heads": lambda n: torch.zeros(n, 8, 8, 8)[:, ::2],
    "inner": lambda n: torch.zeros(n, 4, 8, 16)[..., ::2],
    "transposed": lambda n: torch.zeros(n, 4, 8, 8).mT,
}


@pytest.mark.parametrize("how", STRIDED)
@pytest.mark.parametrize("pooled", [True, False], ids=["pool", "packed"])
@pytest.mark.parametrize("same", [True, False], ids=["in place", "elsewhere"])
def test_states_of_any_stride(how, pooled, same):
    q, k, v, g, beta, S = packed()
    slots = torch.tensor([4, 1, 0]) if pooled else None
    pool = STRIDED[how](5 if pooled else 3)
    pool.copy_(drawn(*pool.shape, seed=9))
    rows = slots.tolist() if pooled else [0, 1, 2]
    pool[rows] = S
    memory = pool.untyped_storage()
    target = pool if same else STRIDED[how](len(pool))
    before, untouched = pool.clone(), target.clone()
    bytes_before = torch.tensor(memory.tolist(), dtype=torch.uint8)
    options = {"output_state": target, "cu_seqlens": BORDERS, "state_indices": slots}
    o, final = chunk_gated_delta_rule(q, k, v, g.exp(), beta, None, pool, True, **options)
    assert final is target
    expected = oracle.delta(q, k, v, g, beta, state=S, cu_seqlens=BORDERS)
    live = [rows[0], rows[2]]
    close([o, target[live]], [expected[0], expected[1][[0, 2]]])
    others = [i for i in range(len(pool)) if i not in live]
    assert_same_bits(target[others], untouched[others], "other rows")
    assert same or torch.equal(pool, before)
    pool.copy_(before)  # what lies between the states is as it was
    assert torch.equal(torch.tensor(memory.tolist(), dtype=torch.uint8), bytes_before)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float16])
@pytest.mark.parametrize("same", [True, False])
def test_narrow_states(dtype, same):
    q, k, v, g, beta, S = packed()
    slots, pool = torch.tensor([4, 1, 0]), torch.zeros(5, 4, 8, 8)
    pool[slots] = S
    pool = pool.to(dtype)
    start, target = pool.float()[slots], pool if same else pool.clone()
    options = {"output_state": target, "cu_seqlens": BORDERS, "state_indices": slots}
    o, _ = chunk_gated_delta_rule(q, k, v, g.exp(), beta, None, pool, True, **options)
    exact = oracle.delta(q, k, v, g, beta, state=start, cu_seqlens=BORDERS)
    close([o], exact[:1])
    rounded = torch.zeros(5, 4, 8, 8)
    rounded[slots] = torch.stack([exact[1][0].float(), start[1], exact[1][2].float()])
    steps = (target.float() - rounded.to(dtype).float()).abs()
    assert (steps <= rounded.abs() * torch.finfo(dtype).eps).all()


def test_an_output_of_another_dtype_or_stride():
    q, k, v, g, beta, _ = packed()
    exact = oracle.delta(q, k, v, g, beta, cu_seqlens=BORDERS)[0]
    for out in (torch.empty(200, 4, 8, dtype=torch.float64), torch.empty(200, 4, 16)[..., ::2]):
        o = chunk_gated_delta_rule(q, k, v, g.exp(), beta, cu_seqlens=BORDERS, output=out)
        assert o is out
        close([o], [exact])


def test_prefill_refuses_by_name():
    q, k, v, _, beta, S = packed()
    for options in (
        {"use_cp": "never"},
        {"backend": "cudnn"},
        {"_cp_chunk_len": 32},
        {"output": drawn(200, 4, 4)},
        {"checkpoint_every_n_tokens": 32},
        {"state_checkpoints": S},
        {"checkpoint_cu_starts": BORDERS},
        {"max_seqlen": 100},
        {"max_seqlen": 201},
        {"initial_state": S[:2]},
        {"beta": beta[:, :2]},
        {"cu_seqlens": None},
    ):
        (argument,) = options
        with pytest.raises(ContractError, match=f"chunk_gated_delta_rule: {argument}: expected"):
            chunk_gated_delta_rule(q, k, v, **{"cu_seqlens": BORDERS, **options})


def test_messages_carry_upstream_s_words():
    """Upstream's own tests read these messages."""
    q, k, v, _, _, S = packed()
    tensors = {"state_checkpoints": S, "checkpoint_cu_starts": BORDERS}
    pooled = {"initial_state": S, "output_final_state": True, "state_indices": torch.arange(3)}
    for words, options in (
        ("multiple of the chunk size", {"checkpoint_every_n_tokens": 100}),
        ("non-negative", {"checkpoint_every_n_tokens": -1}),
        ("must both be provided", {"checkpoint_every_n_tokens": 64}),
        ("must be None", tensors),
        (
            "state_checkpoints must have dtype",
            {**tensors, "checkpoint_every_n_tokens": 64, "state_checkpoints": S.int()},
        ),
        (
            "elements",
            {**tensors, "checkpoint_every_n_tokens": 64, "checkpoint_cu_starts": BORDERS[:2]},
        ),
        ("explicit output_state pool", pooled),
    ):
        with pytest.raises(ValueError, match=words):
            chunk_gated_delta_rule(q, k, v, cu_seqlens=BORDERS, **options)
