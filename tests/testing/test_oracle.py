"""The oracle against hand computation, scalar loops and its own rules for rows."""

import math
from types import SimpleNamespace

import pytest
import torch

from sluice.testing import inputs as draw
from sluice.testing import oracle
from sluice.testing.compare import assert_same_bits, assert_within, relative_error

EXACT = 1e-13


def normal(*shape, seed=0):
    return draw.normal(draw.generator(seed + sum(shape)), *shape)


# --------------------------------------------------------------------------------- by hand


def test_two_tokens_by_hand():
    """One head, K = V = 2: S₀ = 0, the decay halves, beta is ½, and the keys are the axes."""
    q = torch.tensor([[[[1.0, 1.0]], [[1.0, 2.0]]]])
    k = torch.tensor([[[[1.0, 0.0]], [[0.6, 0.8]]]])
    v = torch.tensor([[[[2.0, 4.0]], [[1.0, 1.0]]]])
    g = torch.full((1, 2, 1), math.log(0.5), dtype=torch.float64)
    beta = torch.full((1, 2, 1), 0.5)
    o, state = oracle.delta(q, k, v, g, beta, scale=1.0)
    # token 0: d = ½ (2, 4) = (1, 2); S = [[1, 2], [0, 0]]; o = (1, 2)
    # token 1: S = [[½, 1], [0, 0]]; Sᵀk = (0.3, 0.6); d = ½ (0.7, 0.4) = (0.35, 0.2)
    #          S = [[0.71, 1.12], [0.28, 0.16]]; o = row 0 + 2 · row 1 = (1.27, 1.44)
    want_o = torch.tensor([[1.0, 2.0], [1.27, 1.44]], dtype=torch.float64)
    want_kv = torch.tensor([[0.71, 1.12], [0.28, 0.16]], dtype=torch.float64)
    assert relative_error(o[0, :, 0], want_o) < 1e-7
    assert relative_error(state[0, 0].T, want_kv) < 1e-7
    _, kv = oracle.delta(q, k, v, g, beta, scale=1.0, state_layout="kv")
    assert_same_bits(kv[0, 0], state[0, 0].T, "kv")


def scalar_delta(q, k, v, g, beta, state, scale):
    """The recurrence in Python numbers, with nothing but indices; state is [B, Hv, V, K]."""
    (B, T, Hq, K), Hk, (Hv, V) = q.shape, k.shape[2], v.shape[2:]
    Ho = max(Hq, Hv)
    q, k, v, S = q.tolist(), k.tolist(), v.tolist(), state.tolist()
    o = torch.zeros(B, T, Ho, V, dtype=torch.float64)
    for b in range(B):
        for t in range(T):
            for h in range(Hv):
                key, value, M = k[b][t][h * Hk // Hv], v[b][t][h], S[b][h]
                for j in range(K):
                    if g is not None:
                        log = g[b, t, h, j] if g.ndim == 4 else g[b, t, h]
                        for i in range(V):
                            M[i][j] *= math.exp(log)
                for i in range(V):
                    d = value[i]
                    if beta is not None:
                        d = float(beta[b, t, h]) * (d - sum(M[i][j] * key[j] for j in range(K)))
                    for j in range(K):
                        M[i][j] += d * key[j]
            for h in range(Ho):
                query, M = q[b][t][h * Hq // Ho], S[b][h * Hv // Ho]
                for i in range(V):
                    o[b, t, h, i] = scale * sum(M[i][j] * query[j] for j in range(K))
    return o, torch.tensor(S, dtype=torch.float64)


@pytest.mark.parametrize("per_key", [False, True], ids=["per_head", "per_key"])
@pytest.mark.parametrize("gates", [(), ("g",), ("beta",), ("g", "beta")], ids=" ".join)
@pytest.mark.parametrize("heads", [(2, 2, 6), (1, 2, 4), (4, 2, 4), (6, 3, 3), (4, 1, 2)])
def test_every_rule_and_grouping_equals_the_scalar_loop(delta_inputs, heads, gates, per_key):
    Hq, Hk, Hv = heads
    x = delta_inputs(Hq=Hq, Hk=Hk, Hv=Hv, per_key=per_key)
    x |= {name: None for name in ("g", "beta") if name not in gates}
    o, state = oracle.delta(**x, scale=0.7)
    want_o, want_state = scalar_delta(**x, scale=0.7)
    assert_within(o, want_o, EXACT, name="o")
    assert_within(state, want_state, EXACT, name="state")


def test_raw_gates_scale_and_norm_are_what_the_contract_writes(delta_inputs):
    x = delta_inputs(T=3)
    A_log, dt_bias = normal(4), normal(4, seed=1)
    x["q"], x["k"] = 3.0 * x["q"], 0.2 * x["k"]
    g, beta = torch.zeros_like(x["g"]), torch.zeros_like(x["beta"])
    for index in torch.cartesian_prod(*(torch.arange(n) for n in g.shape)).tolist():
        b, t, h = index
        softplus = math.log1p(math.exp(x["g"][b, t, h] + dt_bias[h]))
        g[b, t, h] = -math.exp(A_log[h]) * softplus
        beta[b, t, h] = 2.0 / (1.0 + math.exp(-x["beta"][b, t, h]))
    unit = {n: x[n] / torch.sqrt((x[n] ** 2).sum(-1, keepdim=True) + 1e-6) for n in ("q", "k")}
    want_o, want_state = scalar_delta(
        **{**x, **unit, "g": g, "beta": beta}, scale=1 / math.sqrt(x["q"].shape[-1])
    )
    o, state = oracle.delta(**x, A_log=A_log, dt_bias=dt_bias, normalize_qk=True, neg_eigval=True)
    assert_within(o, want_o, EXACT, name="o")
    assert_within(state, want_state, EXACT, name="state")


def test_softplus_does_not_overflow_or_lose_its_tail():
    a = torch.tensor([[[800.0, 25.0, -40.0, 0.0]]], dtype=torch.float64)
    g, _ = oracle.raw_gates(a, None, torch.zeros(4), None)
    want = [800.0, 25.0 + math.log1p(math.exp(-25)), math.log1p(math.exp(-40)), math.log(2)]
    assert g[0, 0].tolist() == pytest.approx([-x for x in want], rel=1e-15)


@pytest.mark.parametrize("W", [2, 3, 4])
@pytest.mark.parametrize("bias", [False, True])
def test_convolution_equals_the_scalar_loop(W, bias):
    B, T, D, L = 2, 5, 3, W + 1
    x, weight, state = normal(B, T, D), normal(D, W), normal(B, D, L)
    offset = normal(D) if bias else None
    y, after = oracle.conv(x, weight, offset, state=state)
    for b in range(B):
        for c in range(D):
            line = state[b, c].tolist() + x[b, :, c].tolist()
            assert after[b, c].tolist() == line[T:]
            for t in range(T):
                total = float(offset[c]) if bias else 0.0
                for w in range(W):
                    total += float(weight[c, w]) * line[L + t - W + 1 + w]
                assert float(y[b, t, c]) == pytest.approx(total / (1 + math.exp(-total)), rel=1e-12)


def test_convolution_without_a_state_is_torchs():
    x, weight, bias = normal(2, 9, 6), normal(6, 1, 4), normal(6)
    y, state = oracle.conv(x, weight, bias, activation=None)
    want = torch.nn.functional.conv1d(x.mT, weight, bias, padding=3, groups=6)[..., :9].mT
    assert_within(y, want, EXACT, name="y")
    assert_same_bits(state, x[:, -3:].mT, "state")
    flipped, _ = oracle.conv(x.mT, weight, bias, activation=None, layout="bdt")
    assert_same_bits(flipped, y.mT, "bdt")


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
def test_gated_norm_equals_the_scalar_loop(activation):
    x, z, weight = normal(2, 3, 5), normal(2, 3, 5, seed=1), normal(5)
    y = oracle.rms_norm_gated(x, z, weight, eps=0.1, activation=activation)
    for b in range(2):
        for t in range(3):
            mean = sum(float(v) ** 2 for v in x[b, t]) / 5
            for c in range(5):
                gate = 1 / (1 + math.exp(-z[b, t, c]))
                gate *= float(z[b, t, c]) if activation == "silu" else 1.0
                want = float(weight[c] * x[b, t, c]) / math.sqrt(mean + 0.1) * gate
                assert float(y[b, t, c]) == pytest.approx(want, rel=1e-12)


# ----------------------------------------------------------------------- rows, packing, layouts


def test_packed_equals_separate_and_the_tail_is_zeros(delta_inputs):
    x = delta_inputs(B=1, T=9, P=4)
    state = x.pop("state")
    lengths = (3, 0, 4)
    o, after = oracle.delta(**x, state=state, cu_seqlens=draw.cu_seqlens(lengths))
    start = 0
    for i, n in enumerate(lengths):
        part = {name: t[:, start : start + n] for name, t in x.items()}
        want_o, want_state = oracle.delta(**part, state=state[i : i + 1])
        assert_same_bits(o[:, start : start + n], want_o, f"o of sequence {i}")
        assert_same_bits(after[i], want_state[0], f"state of sequence {i}")
        start += n
    assert_same_bits(o[:, start:], torch.zeros_like(o[:, start:]), "tail")
    assert_same_bits(after[3], state[3], "row of no sequence")
    flat = {name: t[0] for name, t in x.items()}
    again, _ = oracle.delta(**flat, state=state, cu_seqlens=draw.cu_seqlens(lengths))
    assert_same_bits(again, o[0], "flat")


def test_split_anywhere_equals_whole(delta_inputs):
    x = delta_inputs(T=7)
    state = x.pop("state")
    want_o, want_state = oracle.delta(**x, state=state)
    for cut in range(8):
        first, middle = oracle.delta(**{n: t[:, :cut] for n, t in x.items()}, state=state)
        second, last = oracle.delta(**{n: t[:, cut:] for n, t in x.items()}, state=middle)
        assert_same_bits(torch.cat([first, second], dim=1), want_o, f"o cut at {cut}")
        assert_same_bits(last, want_state, f"state cut at {cut}")


def test_rows_of_a_pool_are_read_and_written_as_the_contract_says(delta_inputs):
    x = delta_inputs(B=5, T=3, P=9)
    pool = draw.poisoned_pool(x.pop("state"), [6, 2, 4])
    kwargs = {
        "slots": torch.tensor([6, -1, 2, 8, 4]),
        "write_slots": torch.tensor([0, 1, 2, 8, -3]),
        "has_state": torch.tensor([True, True, True, False, True]),
    }
    o, after = oracle.delta(**x, state=pool, **kwargs)

    def alone(i, state):
        return oracle.delta(**{n: t[i : i + 1] for n, t in x.items()}, state=state)

    for i, write, start in (
        (0, 0, pool[6:7]),
        (2, 2, pool[2:3]),
        (3, 8, None),
        (4, None, pool[4:5]),
    ):
        want_o, want_state = alone(i, start)
        assert_same_bits(o[i], want_o[0], f"o of row {i}")
        if write is not None:
            assert_same_bits(after[write], want_state[0], f"state of row {i}")
    assert_same_bits(o[1], torch.zeros_like(o[1]), "padded row")
    rest = [1, 3, 4, 5, 6, 7]
    assert_same_bits(after[rest], pool[rest], "other rows")
    assert torch.isfinite(o).all()


def test_pad_slot_zero_makes_slot_zero_padding(delta_inputs):
    x = delta_inputs(B=2, T=2, P=3)
    slots = torch.tensor([0, 2])
    o, after = oracle.delta(**x, slots=slots, pad_slot=0)
    assert_same_bits(o[0], torch.zeros_like(o[0]), "o")
    assert_same_bits(after[0], x["state"][0], "slot 0")
    o, after = oracle.delta(**x, slots=slots)
    assert (o[0] != 0).all()
    assert (after[0] != x["state"][0]).any()


def test_layouts_are_the_same_numbers(delta_inputs):
    x = delta_inputs(T=4)
    o, state = oracle.delta(**x)
    swapped = {n: t.transpose(1, 2) for n, t in x.items() if n != "state"}
    o_swapped, _ = oracle.delta(**swapped, state=x["state"], layout="bhtd")
    assert_same_bits(o_swapped, o.transpose(1, 2), "bhtd")
    kv = x["state"].mT.contiguous()
    o_kv, state_kv = oracle.delta(**{**x, "state": kv}, state_layout="kv")
    assert_same_bits(o_kv, o, "o")
    assert_same_bits(state_kv, state.mT, "kv")


def test_checkpoints_are_the_states_of_shorter_sequences(delta_inputs):
    x = delta_inputs(B=2, T=7, P=12)
    state = x.pop("state")
    slots = torch.tensor([[4, 5, 6], [7, -1, 9]])
    positions = torch.tensor([[0, 3, 7], [2, 4, 5]])
    given = SimpleNamespace(slots=slots, positions=positions)
    o, after = oracle.delta(**x, state=state, checkpoints=given)
    plain_o, plain = oracle.delta(**x, state=state)
    assert_same_bits(o, plain_o, "o")
    assert_same_bits(after[[0, 1]], plain[[0, 1]], "final states")
    for i, j in ((0, 0), (0, 1), (0, 2), (1, 0), (1, 2)):
        n = int(positions[i, j])
        part = {name: t[i : i + 1, :n] for name, t in x.items()}
        _, want = oracle.delta(**part, state=state[i : i + 1])
        assert_same_bits(after[slots[i, j]], want[0], f"row {i} after {n} tokens")
    assert_same_bits(after[[2, 3, 8, 10, 11]], state[[2, 3, 8, 10, 11]], "others")
    _, every = oracle.delta(**x, state=state, checkpoints={"slots": slots, "every": 3})
    for n, slot in ((3, 4), (6, 5)):
        part = {name: t[:1, :n] for name, t in x.items()}
        assert_same_bits(every[slot], oracle.delta(**part, state=state[:1])[1][0], f"every {n}")
    assert_same_bits(every[6], state[6], "beyond the end")


def test_conv_checkpoints_and_freeze():
    x, weight, state = normal(2, 5, 4), normal(4, 3), normal(8, 4, 4)
    marks = {"slots": torch.tensor([[3, 4], [5, -1]]), "positions": torch.tensor([[0, 2], [5, 1]])}
    y, after = oracle.conv(x, weight, state=state, checkpoints=marks)
    assert_same_bits(after[3], state[0], "position 0")
    assert_same_bits(after[4], torch.cat([state[0], x[0, :2].T], dim=1)[:, 2:], "position 2")
    assert_same_bits(after[5], after[1], "the end")
    frozen_y, frozen = oracle.conv(x, weight, state=state, freeze=True, checkpoints=marks)
    assert_same_bits(frozen_y, y, "y")
    assert_same_bits(frozen, state, "frozen")


def test_verify_and_commit_are_decoding_the_accepted_tokens(delta_inputs):
    x = delta_inputs(B=3, T=4, P=5)
    conv_inputs, conv_state = normal(3, 4, 6), normal(5, 6, 3)
    slots, accepted = torch.tensor([4, 0, 2]), torch.tensor([0, 4, 2])
    o, state, window = oracle.verify_commit(
        **x, slots=slots, num_accepted=accepted, conv_inputs=conv_inputs, conv_state=conv_state
    )
    assert_same_bits(o, oracle.delta(**x, slots=slots)[0], "o")
    for i, (slot, n) in enumerate(zip(slots.tolist(), accepted.tolist(), strict=True)):
        part = {name: t[i : i + 1, :n] for name, t in x.items() if name != "state"}
        _, want = oracle.delta(**part, state=x["state"][slot : slot + 1])
        assert_same_bits(state[slot], want[0], f"state of row {i}")
        line = torch.cat([conv_state[slot], conv_inputs[i].T], dim=1)
        assert_same_bits(window[slot], line[:, n : n + 3], f"window of row {i}")
    assert_same_bits(state[[1, 3]], x["state"][[1, 3]], "other rows")


def test_inputs_are_never_modified_and_results_are_new(delta_inputs):
    x = delta_inputs(B=2, T=0)
    before = {name: t.clone() for name, t in x.items()}
    o, state = oracle.delta(**x)
    assert o.shape == (2, 0, 4, 3)
    state += 1.0
    x |= delta_inputs(B=2, T=2)
    before |= {name: t.clone() for name, t in x.items()}
    oracle.delta(**x)[1].fill_(0.0)
    for name, t in x.items():
        assert_same_bits(t, before[name], name)
    window = normal(2, 3, 2)
    kept = window.clone()
    oracle.conv(normal(2, 0, 3), normal(3, 3), state=window)[1].fill_(0.0)
    assert_same_bits(window, kept, "window")


def test_step_token_by_token_equals_step_at_once():
    Hk, Hv, K, V, N, T, D = 1, 2, 4, 3, 3, 5, 14
    qkvz, ba = normal(N, T, D + Hv * V), normal(N, T, 2 * Hv)
    weights = {
        "conv_weight": normal(D, 4), "conv_bias": normal(D), "A_log": normal(Hv),
        "dt_bias": normal(Hv), "norm_weight": normal(V), "slots": torch.tensor([2, -1, 0]),
    }  # fmt: skip
    conv_state, state = normal(4, D, 5), normal(4, Hv, V, K)
    y, conv_after, after = oracle.step(qkvz, ba, **weights, conv_state=conv_state, state=state)
    assert y.shape == (N, T, Hv * V)
    assert 2 * Hk * K + Hv * V == D
    for t in range(T):
        one, conv_state, state = oracle.step(
            qkvz[:, t], ba[:, t], **weights, conv_state=conv_state, state=state
        )
        assert_same_bits(one, y[:, t], f"token {t}")
    assert_same_bits(conv_state, conv_after, "conv_state")
    assert_same_bits(state, after, "state")
    assert_same_bits(y[1], torch.zeros_like(y[1]), "padded row")
