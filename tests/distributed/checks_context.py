"""Checks of sequences over ranks that every rank runs, as ``name(rank, size)``."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import sluice
from sluice.distributed import (
    Ranks,
    Split,
    causal_conv1d,
    conv_qkv,
    forward,
    prefill,
    prefill_segments,
    scan,
)
from sluice.layers import GatedDeltaNet, QwenShape
from sluice.testing import inputs, oracle
from sluice.testing.compare import FLOAT32_CPU, assert_same_bits, assert_within
from tests.training.calls import FLOAT32, FLOAT64

HV, HK, K, V = 4, 2, 16, 16


def tokens(T: int, *, seed: int = 0, beta: bool = True, per_key: bool = False) -> dict[str, Tensor]:
    """A packed call's arguments, the same on every rank."""
    gen = inputs.generator(seed)
    decay = inputs.raw_decay(gen, 1, T, HV, "mixed", K if per_key else None)
    args = {
        "q": inputs.keys(gen, 1, T, HK, K),
        "k": inputs.keys(gen, 1, T, HK, K, "correlated"),
        "v": inputs.normal(gen, 1, T, HV, V),
        "g": inputs.decay(**decay),
    }
    if beta:
        args["beta"] = inputs.raw_beta(gen, 1, T, HV).sigmoid()
    return {name: x[0].float() for name, x in args.items()}


def share(args: dict[str, Tensor], split: Split, rank: int) -> dict[str, Tensor]:
    part = split.part(rank)
    return {name: x[part.start : part.stop] for name, x in args.items()}


def packed(size: int) -> tuple[Split, Tensor]:
    """A sequence over all ranks, between two short ones and next to an empty one."""
    bounds = inputs.cu_seqlens((30, 0, 50 * size, 25))
    return Split.even(int(bounds[-1]) + 5, size, bounds), bounds


def own_pool(pool: Tensor, split: Split, rank: int) -> Tensor:
    """A pool in which all rows that this rank may not read hold NaN."""
    return inputs.poisoned_pool(pool, split.part(rank).begins)


def prefill_equals_segments_and_oracle(rank: int, size: int) -> None:
    ranks = Ranks(timeout=30)
    split, bounds = packed(size)
    pool = inputs.recurrent_state(inputs.generator(1), 4, HV, V, K).float()
    for beta, per_key in ((True, False), (True, True), (False, False), (False, True)):
        args = tokens(split.tokens, beta=beta, per_key=per_key)
        o, state = prefill(
            **share(args, split, rank),
            ranks=ranks,
            split=split,
            state=own_pool(pool, split, rank),
            deliver="all",
        )
        whole, after = prefill_segments(**args, split=split, state=pool.clone())
        part = split.part(rank)
        assert_same_bits(o, whole[part.start : part.stop], "o")
        assert_same_bits(state, after, "state")
        scanned, state = prefill(
            **share(args, split, rank),
            ranks=ranks,
            split=split,
            state=own_pool(pool, split, rank),
            deliver="all",
            exchange="scan",
        )
        exact, exact_state = oracle.delta(**args, state=pool, cu_seqlens=bounds)
        assert_within(scanned, exact[part.start : part.stop], FLOAT32_CPU, name="o, scanned")
        assert_within(state, exact_state, FLOAT32_CPU, name="state, scanned", per=0)
        assert_within(whole, exact, FLOAT32_CPU, name="o", per=1)
        assert_within(after, exact_state, FLOAT32_CPU, name="state", per=0)


def a_scan_serves_any_split(rank: int, size: int) -> None:
    """Sequences that begin anywhere and pass through ranks without tokens."""
    ranks = Ranks(timeout=30)
    T = 30 * size
    for borders, lengths in (
        ((0, *[T // 2] * (size - 1), T), (T,)),
        ((0, *[T // 2] * (size - 1), T), (T // 2, T // 2)),
        ((0, *range(10, 10 + size - 1), T), (3, 9, 0, T - 12)),
        ((0, *range(T - size + 1, T), T), (T - 2, 1, 1)),
        ((0, *[0] * (size - 1), T), (T - 5,)),
    ):
        bounds = inputs.cu_seqlens(lengths)
        split = Split(borders, bounds)
        for beta, scan.FAN in ((True, 2), (False, 2), (True, 4)):  # in several steps, and in one
            args = tokens(T, beta=beta)
            o, state = prefill(
                **share(args, split, rank), ranks=ranks, split=split, deliver="all", exchange="scan"
            )
            exact, exact_state = oracle.delta(**args, cu_seqlens=bounds)
            part = split.part(rank)
            if part.stop > part.start:
                assert_within(o, exact[part.start : part.stop], FLOAT32_CPU, name="o")
            assert_within(state, exact_state, FLOAT32_CPU, name="state")


def final_states_go_where_they_were_asked_for(rank: int, size: int) -> None:
    ranks = Ranks(timeout=30)
    split, bounds = packed(size)
    args = tokens(split.tokens)
    _, exact = oracle.delta(**args, cu_seqlens=bounds)
    mine = {"ranks": ranks, "split": split, **share(args, split, rank)}
    for deliver in ("end", "all", 0, size - 1):
        _, state = prefill(**mine, deliver=deliver)
        for i in range(4):
            here = deliver == "all" or rank == (split.end_rank(i) if deliver == "end" else deliver)
            if here:
                assert_within(state[i], exact[i], FLOAT32_CPU, name=f"{deliver}: {i}")
            else:
                assert bool((state[i] == 0).all()), f"{deliver}: {i} on rank {rank}"


def pools_differ_from_rank_to_rank(rank: int, size: int) -> None:
    """Each rank has its own slots; rows that it neither reads nor receives keep their NaN."""
    ranks = Ranks(timeout=30)
    split, bounds = packed(size)
    args = tokens(split.tokens)
    start = inputs.recurrent_state(inputs.generator(2), 4, HV, V, K).float()
    pool = torch.full((10, HV, V, K), float("nan"))
    slots = [(i + rank) % 5 for i in range(4)]
    for i in split.part(rank).begins:
        pool[slots[i]] = start[i]
    before = pool.clone()
    prefill(
        **share(args, split, rank),
        ranks=ranks,
        split=split,
        state=pool,
        slots=slots,
        write_slots=[5 + i for i in range(4)],
    )
    _, exact = oracle.delta(**args, state=start, cu_seqlens=bounds)
    assert_same_bits(pool[:5], before[:5], "rows that were read")
    for i in range(4):
        if i in split.part(rank).ends:
            assert_within(pool[5 + i], exact[i], FLOAT32_CPU, name=f"sequence {i}")
        else:
            assert_same_bits(pool[5 + i], before[5 + i], f"row of sequence {i}")


def a_padded_sequence_may_hold_nan(rank: int, size: int) -> None:
    """Its gates are not looked at, its outputs are zeros, and the others are as without it."""
    ranks = Ranks(timeout=30)
    split, bounds = packed(size)
    args = tokens(split.tokens)
    pool = inputs.recurrent_state(inputs.generator(2), 4, HV, V, K).float()
    exact, _ = oracle.delta(**args, state=pool, cu_seqlens=bounds)
    exact[:30] = 0.0
    args["g"][:30] = args["beta"][:30] = float("nan")
    rows = {"state": pool, "slots": [-1, 1, 2, 3]}
    o, _ = prefill(**share(args, split, rank), ranks=ranks, split=split, **rows)
    part = split.part(rank)
    assert_within(o, exact[part.start : part.stop], FLOAT32_CPU, name="o")


def a_batch_lies_on_all_ranks(rank: int, size: int) -> None:
    ranks = Ranks(timeout=30)
    split = Split.even(70 * size + 3, size)
    rows = [tokens(split.tokens, seed=seed) for seed in range(2)]
    args = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    part = split.part(rank)
    mine = {name: x[:, part.start : part.stop] for name, x in args.items()}
    o, state = prefill(**mine, ranks=ranks, split=split, deliver="all")
    exact, exact_state = oracle.delta(**args)
    assert_within(o, exact[:, part.start : part.stop], FLOAT32_CPU, name="o")
    assert_within(state, exact_state, FLOAT32_CPU, name="state")


def costs_are_what_the_formula_says(rank: int, size: int) -> None:
    ranks = Ranks(timeout=30)
    split = Split.even(64 * size, size, (0, 64 * size))
    for beta, rows in ((True, V + K), (False, V + 1)):
        ranks.exchanges.clear()
        mine = share(tokens(split.tokens, beta=beta), split, rank)
        prefill(**mine, ranks=ranks, split=split, deliver=0)
        cost = ranks.costs()
        assert cost["prefill.transitions"].sent == (size - 1) * 4 * HV * K * rows
        assert cost["prefill.transitions"].received == cost["prefill.transitions"].sent
        assert cost["prefill.transitions"].calls == cost["agreement"].calls == 1
        assert 0 < cost["prefill.transitions"].seconds < 30
        if size > 1 and rank in (0, size - 1):
            moved = cost["prefill.states"]
            bytes_ = 4 * HV * K * V
            assert (moved.sent, moved.received) == ((0, bytes_) if rank == 0 else (bytes_, 0))
        else:
            assert "prefill.states" not in cost
    ranks.exchanges.clear()
    mine = share(tokens(split.tokens), split, rank)
    scan.GATHERED, kept = 1, scan.GATHERED  # so that even few ranks scan
    prefill(**mine, ranks=ranks, split=split)
    scan.GATHERED = kept
    whole, cost = 4 * HV * K * (V + K), ranks.costs()["prefill.transitions"]
    assert cost.sent == whole * min(size - 1 - rank, 3), "4 ranks at most: one step"
    assert cost.received == whole * min(rank, 3)
    ranks.exchanges.clear()
    apart = Split((0, *(64 * (r + 1) for r in range(size))), [64 * r for r in range(size + 1)])
    prefill(**share(tokens(apart.tokens), apart, rank), ranks=ranks, split=apart)
    assert set(ranks.costs()) == {"agreement"}, "nothing crosses, so nothing is exchanged"


def conv_tails_cross_borders(rank: int, size: int) -> None:
    ranks = Ranks(timeout=30)
    gen = inputs.generator(3)
    D, T = 12, 40 * size
    x, bias = inputs.normal(gen, T, D).float(), inputs.normal(gen, D).float()
    splits = [
        Split.even(T, size, (0, 10, 10, T - 5, T)),
        Split((0, *(20 * (r + 1) for r in range(size - 1)), T), (0, 19, T)),  # one token before
        Split((0, *range(1, size), T), (0, T)),  # windows with tokens of several ranks
        Split((0, *[T - 2] * (size - 1), T), (0, T - 1, T)),  # ranks without tokens
    ]
    for W, L in ((4, 3), (2, 4), (3, 6)):
        weight = inputs.normal(gen, D, W).float()
        for split in splits:
            n, part = len(split.cu_seqlens) - 1, split.part(rank)
            pool = inputs.normal(gen, n, D, L).float()
            bounds = torch.tensor(split.cu_seqlens)
            exact, after = oracle.conv(x, weight, bias, state=pool, cu_seqlens=bounds)
            y, state = causal_conv1d(
                x[part.start : part.stop],
                weight,
                bias,
                ranks=ranks,
                split=split,
                state=inputs.poisoned_pool(pool, part.begins),
                deliver="all",
            )
            if part.stop > part.start:
                assert_within(y, exact[part.start : part.stop], FLOAT32_CPU, name="y")
            assert_same_bits(state, after.float(), "windows are copies of inputs")
    cost = ranks.costs()["conv.tails"]
    assert cost.sent == cost.calls // 3 * (size - 1) * 4 * D * (3 + 4 + 6)


def conv_qkv_and_narrow_windows(rank: int, size: int) -> None:
    """A tail is sent unrounded, even if the pool is narrower than the inputs."""
    ranks = Ranks(timeout=30)
    gen = inputs.generator(4)
    T, D = 30 * size, 2 * HK * K + HV * V
    split = Split.even(T, size, (0, T))
    x, weight = inputs.normal(gen, 1, T, D).float(), inputs.normal(gen, D, 4).float()
    a, b = inputs.normal(gen, 1, T, HV).float(), inputs.normal(gen, 1, T, HV).float()
    pool = inputs.normal(gen, 1, D, 3).bfloat16()
    heads = {"num_k_heads": HK, "num_v_heads": HV, "A_log": torch.zeros(HV)}
    exact, after = oracle.conv_qkv(x, weight, a=a, b=b, state=pool, **heads)
    at = slice(split.part(rank).start, split.part(rank).stop)
    made = conv_qkv(
        x[0, at],
        weight,
        a=a[0, at],
        b=b[0, at],
        **heads,
        ranks=ranks,
        split=split,
        state=pool,
        deliver=0,
    )
    for got, want, name in zip(made, exact, "qkvgb", strict=True):
        assert_within(got, want[0, at], FLOAT32_CPU, name=name)
    if rank == 0:
        assert_same_bits(pool, after.bfloat16(), "window, rounded once")


def a_layer_runs_over_ranks(rank: int, size: int) -> None:
    ranks = Ranks(timeout=30)
    for order, gate, eps in (("split", "silu", 1e-6), ("interleaved", "sigmoid", 0.1)):
        torch.manual_seed(0)
        sizes = {"head_k_dim": K, "head_v_dim": V}
        options = {"order": order, "gate_activation": gate, "norm_eps": eps}
        layer = GatedDeltaNet(QwenShape("s", 24, HK, HV, 1, (0,), **sizes, **options))
        layer.A_log.fill_(-4.0)  # weak decay, so that state from other ranks matters
        split, bounds = packed(size)
        x = torch.randn(split.tokens, 24)
        conv, state = layer.zero_states(4)
        conv.normal_(), state.normal_()
        mine = [t.clone() for t in (conv, state)]
        whole = layer(x, conv_state=conv, state=state, cu_seqlens=bounds)
        part = split.part(rank)
        y = forward(
            layer,
            x[part.start : part.stop],
            ranks=ranks,
            split=split,
            conv_state=mine[0],
            state=mine[1],
            deliver="all",
        )
        assert_within(y, whole[part.start : part.stop].double(), FLOAT32_CPU, name="y")
        assert_within(mine[0], conv.double(), FLOAT32_CPU, name="conv state")
        assert_within(mine[1], state.double(), FLOAT32_CPU, name="state")


def serving_goes_on_behind_a_split_prefill(rank: int, size: int) -> None:
    """Decode on one rank continues from what all ranks prefilled."""
    ranks = Ranks(timeout=30)
    split = Split.even(60 * size, size, (0, 60 * size))
    args = tokens(split.tokens + 4)
    mine = share(args, split, rank)
    _, state = prefill(**mine, ranks=ranks, split=split, deliver=0)
    if rank == 0:
        last = {name: x[None, split.tokens :] for name, x in args.items()}
        o, _ = sluice.decode(**last, state=state)
        exact, _ = oracle.delta(**args, cu_seqlens=torch.tensor([0, split.tokens + 4]))
        assert_within(o[0], exact[split.tokens :], FLOAT32_CPU, name="o")


@torch.enable_grad()
def gradients_equal_those_of_one_device(rank: int, size: int) -> None:
    ranks = Ranks(timeout=30)
    split, bounds = packed(size)
    part = split.part(rank)
    at = slice(part.start, part.stop)
    for beta, per_key in ((True, False), (True, True), (False, False)):
        args = {n: x.double() for n, x in tokens(split.tokens, beta=beta, per_key=per_key).items()}
        weight = inputs.normal(inputs.generator(5), 1, split.tokens, HV, V)[0]
        whole = {n: x.clone().requires_grad_() for n, x in args.items()}
        o, _ = sluice.prefill(**whole, cu_seqlens=bounds)
        exact = torch.autograd.grad((o * weight).sum(), list(whole.values()))
        for dtype, limit in ((torch.float64, FLOAT64), (torch.float32, FLOAT32)):
            mine = {n: x[at].to(dtype, copy=True).requires_grad_() for n, x in args.items()}
            o, state = prefill(**mine, ranks=ranks, split=split)
            found = torch.autograd.grad((o * weight[at]).sum(), list(mine.values()))
            for name, a, b in zip(args, found, exact, strict=True):
                assert_within(a, b[at], limit, name=f"d{name}, {dtype}")
            with pytest.raises(sluice.SluiceError, match="no gradient is defined through states"):
                state.sum().backward()


@torch.enable_grad()
def gradients_of_a_layer_equal_those_of_one_device(rank: int, size: int) -> None:
    """Parameters: the sum of the ranks' parts. A row of a batch, cut at short borders too."""
    ranks = Ranks(timeout=30)
    torch.manual_seed(0)
    shape = QwenShape("small", 24, 2, 4, 1, (0,), head_k_dim=8, head_v_dim=8)
    layer = GatedDeltaNet(shape).double()
    T = 20 * size
    borders = (0, *(20 * r + 1 for r in range(1, size - 1)), T - 2, T)
    x, weight = torch.randn(2, T, 24).double(), torch.randn(2, T, 24).double()
    for split in (Split.even(T, size), Split(borders)):
        at = slice(split.part(rank).start, split.part(rank).stop)
        whole = x.clone().requires_grad_()
        names, parameters = zip(*layer.named_parameters(), strict=True)
        exact = torch.autograd.grad((layer(whole) * weight).sum(), [whole, *parameters])
        mine = x[:, at].clone().requires_grad_()
        y = forward(layer, mine, ranks=ranks, split=split)
        found = torch.autograd.grad((y * weight[:, at]).sum(), [mine, *parameters])
        assert_within(found[0], exact[0][:, at], 1e-10, name="dx")
        for name, a, b in zip(names, found[1:], exact[1:], strict=True):
            assert_within(ranks.all_reduce("test", a.clone()), b, 1e-10, name=name)


CHECKS = (
    gradients_equal_those_of_one_device,
    gradients_of_a_layer_equal_those_of_one_device,
    prefill_equals_segments_and_oracle,
    a_scan_serves_any_split,
    final_states_go_where_they_were_asked_for,
    pools_differ_from_rank_to_rank,
    a_padded_sequence_may_hold_nan,
    a_batch_lies_on_all_ranks,
    costs_are_what_the_formula_says,
    conv_tails_cross_borders,
    conv_qkv_and_narrow_windows,
    a_layer_runs_over_ranks,
    serving_goes_on_behind_a_split_prefill,
)
