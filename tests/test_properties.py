"""Properties that hold for all shapes, lengths, slots, pads and splits, on every backend."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sluice
from sluice.state_pool import PoolGeometry, StatePool
from sluice.testing import compare
from tests import calls, serving
from tests.calls import OPS, ask, make, seeds, shapes
from tests.serving import Server, servers
from tests.suite import DEVICE, backends

FLOAT32 = torch.float32
TOKENS = {"prefill": 70}  # decode, verify and step take at most 8
EVERY_SERVER = servers(*OPS)
POOLED = servers(*(op for op in OPS if op != "rms_norm_gated"))
PACKED = servers("prefill", "decode", "verify", "causal_conv1d", "conv_qkv")


def assert_pools_agree(server: Server, actual: calls.Call, expected: calls.Call) -> None:
    for name, pool in actual.pools.items():
        server.agree(pool, expected.pools[name], actual.shape, name)


# --------------------------------------------------------------------------- sequences and cuts


@pytest.mark.parametrize("server", PACKED)
@given(shape=shapes(), data=st.data(), seed=seeds)
def test_packed_equals_separate(server, shape, data, seed):
    longest = TOKENS.get(server.op, 8)
    lengths = data.draw(st.lists(st.integers(0, longest), min_size=1, max_size=4))
    tail = data.draw(st.integers(0, 3))
    N, T = len(lengths), sum(lengths)
    together = make(server.op, shape, 1, T + tail, seed, P=N + 2)
    slots = calls.index(calls.spread(seed, N + 2, N))
    if server.op == "verify":
        accepted = [data.draw(st.integers(0, n)) for n in lengths]
        together.rows["num_accepted"] = calls.index(accepted)
    apart = together.copy()

    got = server.run(together, slots=slots, **calls.packing(lengths))
    for i, (start, stop) in enumerate(calls.spans(lengths)):
        one = apart.span(start, stop)
        if server.op == "verify":
            one.rows["num_accepted"] = slots.new_tensor(accepted[i : i + 1])
        for name, x in server.run(one, slots=slots[i : i + 1]).items():
            part = got[name][:, start:stop]
            server.agree(part, x, shape, f"{name} of sequence {i}")
    assert all(not x[:, T:].any() for x in got.values())
    assert_pools_agree(server, together, apart)


@pytest.mark.parametrize("server", servers("prefill"))
@given(shape=shapes(state_dtype=FLOAT32), T=st.integers(1, 150), data=st.data(), seed=seeds)
def test_split_anywhere_equals_whole(server, shape, T, data, seed):
    cuts = sorted(data.draw(st.sets(st.integers(0, T), max_size=3)))
    whole = make("prefill", shape, data.draw(st.integers(1, 2)), T, seed)
    split = whole.copy()
    expected = server.run(whole)["o"]
    got = [server.run(split.span(a, b))["o"] for a, b in zip([0, *cuts], [*cuts, T], strict=True)]
    serving.close(torch.cat(got, dim=1), expected, shape, "o")
    serving.close(split.pools["state"], whole.pools["state"], shape, "state")


@pytest.mark.parametrize("server", servers("prefill"))
@given(
    shape=shapes(state_dtype=FLOAT32),
    cut=st.sampled_from((64, 128)),
    rest=st.integers(1, 70),
    N=st.integers(1, 2),
    seed=seeds,
)
def test_split_at_a_multiple_of_64_is_the_same_bits(server, shape, cut, rest, N, seed):
    whole = make("prefill", shape, N, cut + rest, seed)
    split = whole.copy()
    expected = server.run(whole)["o"]
    got = [server.run(split.span(*part))["o"] for part in ((0, cut), (cut, cut + rest))]
    serving.same_bits(torch.cat(got, dim=1), expected, shape, "o")
    serving.same_bits(split.pools["state"], whole.pools["state"], shape, "state")


@pytest.mark.parametrize("backend", backends("prefill"))
@given(
    shape=shapes(state_dtype=FLOAT32),
    prompt=st.integers(0, 70),
    steps=st.lists(st.integers(1, 8), min_size=1, max_size=5),
    N=st.integers(1, 3),
    seed=seeds,
)
def test_decode_continues_prefill(backend, shape, prompt, steps, N, seed):
    whole = make("prefill", shape, N, prompt + sum(steps), seed)
    parts = whole.copy()
    expected = whole.run(backend)["o"]
    got = [parts.span(0, prompt).run(backend)["o"]]
    for start, stop in calls.spans(steps):
        step = replace(parts.span(prompt + start, prompt + stop), op="decode")
        got.append(step.run(serving.beside(backend, "decode"))["o"])
    serving.close(torch.cat(got, dim=1), expected, shape, "o")
    serving.close(parts.pools["state"], whole.pools["state"], shape, "state")


@pytest.mark.parametrize("backend", backends("prefill"))
@given(shape=shapes(), T=st.integers(1, 100), data=st.data(), seed=seeds)
def test_a_checkpoint_is_the_state_of_the_prefix(backend, shape, T, data, seed):
    positions = data.draw(st.lists(st.integers(0, T), min_size=1, max_size=3))
    call = make("prefill", shape, 1, T, seed, P=5)
    prefixes = [call.copy() for _ in positions]
    slots = calls.index(list(range(1, len(positions) + 1))).view(1, -1)
    kept = sluice.Checkpoints(slots, positions=calls.index(positions).view(1, -1))
    call.run(backend, slots=calls.index([0]), checkpoints=kept)
    for j, (n, prefix) in enumerate(zip(positions, prefixes, strict=True)):
        prefix.span(0, n).run(backend, slots=calls.index([0]))
        serving.close(call.pools["state"][1 + j], prefix.pools["state"][0], shape, "state")


# ------------------------------------------------------------------------------------ speculation


@pytest.mark.parametrize("backend", backends("verify"))
@given(shape=shapes(), data=st.data(), N=st.integers(1, 4), seed=seeds)
def test_verify_and_commit_are_decode_of_the_accepted_tokens(backend, shape, data, N, seed):
    """The same bits of state and conv window; counts differ by row, with decodes in between."""
    rounds = data.draw(
        st.lists(st.tuples(st.integers(1, 8), st.booleans()), min_size=1, max_size=4)
    )
    slots = calls.spread(seed, N + 3, N)
    drafted = make("verify", shape, N, 8, seed, P=N + 3)
    decoded = drafted.copy()
    for number, (T, draft) in enumerate(rounds):
        tokens = make("verify", shape, N, T, seed + number)
        accepted = [data.draw(st.integers(0, T)) if draft else T for _ in slots]
        call = replace(drafted, rows={**tokens.rows, "num_accepted": calls.index(accepted)})
        if draft:
            outputs = call.run(backend, slots=calls.index(slots))["o"]
        else:
            outputs = decode(call, backend, slots)
        for i, n in enumerate(accepted):
            one = replace(decoded, rows=tokens.pick(slice(i, i + 1)).span(0, n).rows)
            if n:
                o = decode(one, backend, slots[i : i + 1])
                serving.same_bits(outputs[i : i + 1, :n], o, shape, f"round {number}: o[{i}]")
        for name, pool in drafted.pools.items():
            serving.same_bits(pool, decoded.pools[name], shape, f"round {number}: {name}")


def decode(call: calls.Call, backend: str, slots: list[int]) -> torch.Tensor:
    """Decode the tokens of a verify call, and roll its conv window by the convolution."""
    rows = {n: x for n, x in call.rows.items() if n in ("q", "k", "v", "g", "beta")}
    where = {"slots": calls.index(slots)}
    o, _ = ask("decode", backend, **rows, **call.fixed, state=call.pools["state"], **where)
    x, window = call.rows["conv_inputs"], call.pools["conv_state"]
    weight = x.new_ones(x.shape[-1], 2)
    ask("causal_conv1d", serving.beside(backend, "causal_conv1d"), x, weight, state=window, **where)
    return o


@pytest.mark.parametrize("backend", backends("step"))
@given(
    shape=shapes(),
    data=st.data(),
    conv_order=st.sampled_from(("dl", "ld")),
    reserve=st.booleans(),
    seed=seeds,
)
def test_snapshot_and_restore_is_never_having_left(backend, shape, data, conv_order, reserve, seed):
    """Two layers: sequences leave the pool, others use their rows, and they return to new rows."""
    model = [make("step", shape, 3, 1, seed + layer, P=1) for layer in range(2)]
    geometry = PoolGeometry(
        layers=2,
        num_v_heads=shape.Hv,
        conv_channels=shape.D,
        head_k_dim=shape.K,
        head_v_dim=shape.V,
        conv_columns=shape.W - 1 + shape.spare,
        state_dtype=shape.state_dtype,
        conv_dtype=shape.dtype,
    )
    options: dict[str, Any] = {"device": DEVICE, "state_layout": shape.state_layout}
    home = StatePool(geometry, 6, conv_order=conv_order, **options)
    away = StatePool(geometry, 6, reserve_slot_0=reserve, **options)
    mine, moved = home.allocate(3), away.allocate(3)

    def step(pool: StatePool, slots: list[Any], number: int) -> list[torch.Tensor]:
        outputs = []
        for i, layer in enumerate(model):
            conv_state, state = pool.layer(i)
            tokens = make("step", shape, 3, 1, seed + 7 * number + i).rows
            where = {"slots": pool.indices(slots), "pad_slot": pool.pad_slot}
            call = replace(layer, rows=tokens, pools={"conv_state": conv_state, "state": state})
            outputs.append(call.run(backend, **where)["o"])
        return outputs

    for number, leave in enumerate(data.draw(st.lists(st.booleans(), min_size=1, max_size=5))):
        if leave:
            saved = away.snapshot(moved)
            away.free(moved)
            away.conv.fill_(float("nan"))
            away.recurrent.fill_(float("nan"))
            taken = away.allocate(data.draw(st.integers(0, 2)))
            moved = away.restore(saved)
            away.free(taken)
        pairs = zip(step(home, mine, number), step(away, moved, number), strict=True)
        for layer, (stayed, returned) in enumerate(pairs):
            serving.same_bits(returned, stayed, shape, f"step {number}, layer {layer}")
    here, there = home.snapshot(mine), away.snapshot(moved)
    serving.same_bits(there.conv, here.conv, shape, "conv")
    serving.same_bits(there.recurrent, here.recurrent, shape, "recurrent")


# -------------------------------------------------------------------------- batches, heads, pads


@pytest.mark.parametrize("server", EVERY_SERVER)
@given(shape=shapes(), N=st.integers(2, 5), data=st.data(), seed=seeds)
def test_a_row_alone_is_the_row_in_a_batch(server, shape, N, data, seed):
    T = data.draw(st.integers(1, TOKENS.get(server.op, 8)))
    batch = make(server.op, shape, N, T, seed)
    if batch.pools:
        batch.index["slots"] = calls.index(calls.spread(seed, N, N))
    alone = batch.copy()
    together = server.run(batch)
    for i in range(N):
        for name, x in server.run(alone.pick(slice(i, i + 1))).items():
            server.agree(together[name][i : i + 1], x, shape, f"{name}[{i}]")
    assert_pools_agree(server, batch, alone)


@pytest.mark.parametrize("server", EVERY_SERVER)
@given(
    shape=shapes(Hk=16), ranks=st.sampled_from((4, 16)), views=st.booleans(), T=st.integers(1, 8),
    seed=seeds,
)  # fmt: skip
def test_16_heads_are_4_times_4_heads(server, shape, ranks, views, T, seed):
    whole = make(server.op, shape, 2, T, seed)
    parts = [whole.shard(rank, ranks, contiguous=not views) for rank in range(ranks)]
    expected = server.run(whole)
    got = [server.run(part) for part in parts]
    for name, x in expected.items():
        joined = joined_heads(server.op, name, [part[name] for part in got], shape)
        server.agree(joined, x, shape, name)
    for rank, part in enumerate(parts):
        for name, pool in whole.shard(rank, ranks).pools.items():
            server.agree(part.pools[name], pool, shape, f"{name} of rank {rank}")


def joined_heads(op: str, name: str, parts: list[torch.Tensor], shape: calls.Shape) -> Any:
    if op != "causal_conv1d":
        return torch.cat(parts, dim=2)
    sizes = [n // len(parts) for n in shape.qkv]
    columns = zip(*(part.split(sizes, dim=2) for part in parts), strict=True)
    return torch.cat([x for column in columns for x in column], dim=2)


@pytest.mark.parametrize("server", POOLED)
@given(shape=shapes(), N=st.integers(1, 4), pads=st.integers(1, 3), data=st.data(), seed=seeds)
def test_padding_anywhere_changes_nothing_else(server, shape, N, pads, data, seed):
    T = data.draw(st.integers(1, TOKENS.get(server.op, 8)))
    pad_slot = data.draw(st.sampled_from((-1, 0)))
    every = make(server.op, shape, N + pads, T, seed, P=N + 3)
    dead = data.draw(st.sets(st.integers(0, N + pads - 1), min_size=pads, max_size=pads))
    live = [i for i in range(N + pads) if i not in dead]
    for name, x in every.rows.items():
        if name in ("q", "k", "v", "x", "qkvz", "conv_inputs"):
            x[list(dead)] = float("nan")
    slots = torch.full((N + pads,), pad_slot, dtype=torch.int64, device=DEVICE)
    slots[sorted(dead)[0]] = -3
    slots[live] = calls.index(calls.spread(seed, N + 3, N, first=1))
    without = every.copy()
    got = server.run(every, slots=slots, pad_slot=pad_slot)
    expected = server.run(without.pick(live), slots=slots[live], pad_slot=pad_slot)
    for name, x in got.items():
        server.agree(x[live], expected[name], shape, name)
        assert not x[list(dead)].any()
    assert_pools_agree(server, every, without)


# ------------------------------------------------------------------- the convolution and the layer


@pytest.mark.parametrize("server", servers("causal_conv1d", "conv_qkv"))
@given(shape=shapes(), T=st.integers(1, 30), data=st.data(), seed=seeds)
def test_a_split_convolution_equals_the_whole(server, shape, T, data, seed):
    cuts = sorted(data.draw(st.sets(st.integers(0, T), max_size=4)))
    whole = make(server.op, shape, 2, T, seed)
    split = whole.copy()
    expected = server.run(whole)
    parts = [server.run(split.span(a, b)) for a, b in zip([0, *cuts], [*cuts, T], strict=True)]
    for name, x in expected.items():
        serving.close(torch.cat([part[name] for part in parts], dim=1), x, shape, name)
    serving.same_bits(split.pools["state"], whole.pools["state"], shape, "conv state")


@pytest.mark.parametrize("backend", backends("conv_qkv"))
@given(shape=shapes(), T=st.integers(1, 20), seed=seeds)
def test_conv_qkv_is_the_convolution_then_split_norm_and_gates(backend, shape, T, seed):
    fused = make("conv_qkv", shape, 2, T, seed)
    apart = fused.copy()
    got = fused.run(backend)
    weights = {name: apart.fixed.get(name) for name in ("weight", "bias")}
    y, window = ask(
        "causal_conv1d",
        serving.beside(backend, "causal_conv1d"),
        apart.rows["x"],
        state=apart.pools["state"],
        activation=shape.activation,
        **weights,
    )
    q, k, v = (x.float() for x in y.split(shape.qkv, dim=2))
    q, k = q.unflatten(2, (shape.Hk, shape.K)), k.unflatten(2, (shape.Hk, shape.K))
    if shape.normalize:
        q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    a, b, A_log, dt_bias = (
        {**apart.rows, **apart.fixed}[name].float() for name in ("a", "b", "A_log", "dt_bias")
    )
    expected = {
        "q": q,
        "k": k,
        "v": v.unflatten(2, (shape.Hv, shape.V)),
        "g": -A_log.exp() * torch.nn.functional.softplus(a + dt_bias),
        "beta": b.sigmoid() * (2 if shape.neg_eigval else 1),
    }
    for name, x in expected.items():
        rounding = shape if name in "qkv" else replace(shape, dtype=FLOAT32)
        serving.close(got[name], x, rounding, name)
    serving.same_bits(fused.pools["state"], window, shape, "conv state")


@pytest.mark.parametrize("backend", backends("step"))
@given(
    shape=shapes(order="split", normalize=True),
    T=st.integers(1, 8),
    N=st.integers(1, 3),
    seed=seeds,
)
def test_step_is_conv_qkv_then_decode_then_the_gated_norm(backend, shape, T, N, seed):
    fused = make("step", shape, N, T, seed)
    apart = fused.copy()
    got = fused.run(backend)["o"]

    weights, options = apart.fixed, {"neg_eigval": shape.neg_eigval}
    qkv, z = apart.rows["qkvz"].split([shape.D, shape.Hv * shape.V], dim=2)
    b, a = apart.rows["ba"].split([shape.Hv, shape.Hv], dim=2)
    gates = {"a": a, "b": b, "A_log": weights["A_log"], "dt_bias": weights["dt_bias"]}
    heads = {"num_k_heads": shape.Hk, "num_v_heads": shape.Hv}
    q, k, v, g, beta = ask(
        "conv_qkv", serving.beside(backend, "conv_qkv"), qkv, weights["conv_weight"],
        weights.get("conv_bias"), **heads, head_k_dim=shape.K, head_v_dim=shape.V, **gates,
        **options, normalize_qk=shape.normalize, activation=shape.activation,
        state=apart.pools["conv_state"],
    )  # fmt: skip
    state = {"state": apart.pools["state"], "state_layout": shape.state_layout}
    o, _ = ask("decode", serving.beside(backend, "decode"), q, k, v, g, beta, **state)
    y = ask(
        "rms_norm_gated",
        serving.beside(backend, "rms_norm_gated"),
        o,
        z.unflatten(2, (shape.Hv, shape.V)),
        weights["norm_weight"],
    )
    serving.close(got, y.flatten(2), shape, "y")
    serving.same_bits(fused.pools["conv_state"], apart.pools["conv_state"], shape, "conv state")
    serving.close(fused.pools["state"], apart.pools["state"], shape, "state")


@given(shape=shapes(), seed=seeds)
def test_drawn_tokens_and_states_are_alive(shape, seed):
    """Inputs are not zeros, which would make the properties above trivial."""
    call = make("prefill", shape, 2, 9, seed)
    before = call.pools["state"].clone()
    o = call.run(None)["o"]
    assert all(row.any() for row in o.flatten(0, 2))
    assert compare.relative_error(call.pools["state"], before) > 1e-4
