"""The tokenspeed adapter in a registry with tokenspeed's signatures, against plain sequences."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import IntEnum
from types import ModuleType

import pytest
import torch

from sluice import ops
from sluice.integrations import tokenspeed
from sluice.testing.compare import assert_within, tolerance

HK, HV, K, V, P = 2, 4, 16, 8, 12
TOLERANCE = 3 * tolerance(torch.float32, device="cpu")


class Priority(IntEnum):
    REFERENCE = 0
    PLUGIN = 16


@dataclass(frozen=True)
class Capability:
    vendors: frozenset


@dataclass(frozen=True)
class Result:
    out: torch.Tensor
    final_state: torch.Tensor | None
    h: torch.Tensor | None = None


@pytest.fixture
def kernels(monkeypatch):
    """The names and keywords of tokenspeed_kernel that a plug-in uses."""
    found = {}

    def register_kernel(
        family, mode, *, name=None, features=None, solution, capability=None, signatures,
        traits=None, priority=10, tags=None, weight_preprocessor=None,
    ):  # fmt: skip
        assert family == "attention"
        assert 0 <= int(priority) < 20
        assert signatures

        def keep(function):
            found[mode] = (function, int(priority), traits or {}, name)
            return function

        return keep

    modules = {
        "tokenspeed_kernel.registry": {"register_kernel": register_kernel, "Priority": Priority},
        "tokenspeed_kernel.platform": {"CapabilityRequirement": Capability},
        "tokenspeed_kernel.signature": {
            "format_signatures": lambda roles, kind, dtypes: frozenset((roles, d) for d in dtypes)
        },
        "tokenspeed_kernel.ops.attention.gdn_utils": {"GdnChunkPrefillResult": Result},
    }
    for name, attributes in modules.items():
        module = ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("tokenspeed_kernel", "tokenspeed_kernel.ops", "tokenspeed_kernel.ops.attention"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    tokenspeed.register()
    return found


class Data:
    """Tokens of B sequences, a pool, and the answers of plain decode calls."""

    def __init__(self, B: int, T: int) -> None:
        draw = torch.Generator().manual_seed(B + T)
        self.q, self.k = (torch.randn(B, T, HK, K, generator=draw) for _ in "qk")
        self.v = torch.randn(B, T, HV, V, generator=draw)
        self.a, self.b = (torch.randn(B, T, HV, generator=draw) for _ in "ab")
        self.A_log, self.dt_bias = (torch.randn(HV, generator=draw) for _ in "Ad")
        self.pool = torch.randn(P, HV, V, K, generator=draw)

    def gates(self):
        return {"A_log": self.A_log, "dt_bias": self.dt_bias}

    def states(self, slots):
        """(o [B, T, ..], the state after each token [T][B, ..])."""
        state, outs, kept = self.pool[slots].clone(), [], []
        for t in range(self.q.shape[1]):
            part = (x[:, t : t + 1] for x in (self.q, self.k, self.v, self.a, self.b))
            o, _ = ops.decode(*part, **self.gates(), normalize_qk=True, state=state)
            outs.append(o)
            kept.append(state.clone())
        return torch.cat(outs, dim=1), kept


def _ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def test_kernels_are_registered_where_they_win(kernels):
    assert {mode: row[1] for mode, row in kernels.items()} == {
        "gdn_chunk_prefill": 16,
        "gdn_decode_step": 16,
        "gdn_decode_mtp": 16,
        "gdn_replay_commit": 0,
    }
    assert kernels["gdn_chunk_prefill"][2]["output_h"] == {False}


def test_prefill_returns_the_final_state_and_leaves_the_first(kernels):
    draw = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 90, HK, K, generator=draw) for _ in "qk")
    v = torch.randn(1, 90, HV, V, generator=draw)
    g, beta = -torch.rand(1, 90, HV, generator=draw), torch.rand(1, 90, HV, generator=draw)
    first = torch.randn(2, HV, V, K, generator=draw)
    kept, borders = first.clone(), _ints(0, 20, 90)
    got = kernels["gdn_chunk_prefill"][0](
        q, k, v, g, beta, scale=None, initial_state=first, cu_seqlens=borders, qk_l2norm=True
    )
    state = kept.clone()
    want, _ = ops.prefill(q, k, v, g, beta, normalize_qk=True, state=state, cu_seqlens=borders)
    assert_within(got.out, want, TOLERANCE, name="o")
    assert_within(got.final_state, state, TOLERANCE, name="state")
    assert torch.equal(first, kept)


def test_a_decode_step_writes_where_it_is_told(kernels):
    d = Data(3, 1)
    slots, to = _ints(4, -1, 2), _ints(5, 6, 2)
    before = d.pool.clone()
    want, kept = d.states([4, 0, 2])
    got = kernels["gdn_decode_step"][0](
        d.q, d.k, d.v, a=d.a, b=d.b, **d.gates(), initial_state=d.pool,
        initial_state_indices=slots, output_state_indices=to,
    )  # fmt: skip
    assert_within(got[[0, 2]], want[[0, 2]], TOLERANCE, name="o")
    assert_within(d.pool[[5, 2]], kept[0][[0, 2]], TOLERANCE, name="states")
    others = [i for i in range(P) if i not in (5, 2)]
    assert torch.equal(d.pool[others], before[others])


@pytest.mark.parametrize("T", [4, 10])
@pytest.mark.parametrize("frozen", [False, True])
def test_drafts_keep_the_last_state_or_none(kernels, T, frozen):
    d = Data(2, T)
    before = d.pool.clone()
    want, kept = d.states([7, 3])
    got = kernels["gdn_decode_mtp"][0](
        d.q, d.k, d.v, a=d.a, b=d.b, **d.gates(), initial_state=d.pool,
        initial_state_indices=_ints(7, 3), disable_state_update=frozen,
    )  # fmt: skip
    assert_within(got, want, TOLERANCE, name="o")
    if frozen:
        assert torch.equal(d.pool, before)
    else:
        assert_within(d.pool[[7, 3]], kept[-1], TOLERANCE, name="states")


@pytest.mark.parametrize("buffered", [False, True])
def test_drafts_keep_every_state(kernels, buffered):
    """In a buffer, or in slots of the pool, of which the first is the one that was read."""
    d = Data(3, 4)
    slots = _ints(1, -1, 6)
    want, kept = d.states([1, 0, 6])
    to = _ints(*range(1, 5), *[-1] * 4, *range(6, 10)).view(3, 4)
    buffer = torch.zeros(3, 4, HV, V, K) if buffered else None
    got = kernels["gdn_decode_mtp"][0](
        d.q, d.k, d.v, a=d.a, b=d.b, **d.gates(), initial_state=d.pool,
        initial_state_indices=slots, disable_state_update=buffered,
        intermediate_states_buffer=buffer, output_state_indices=None if buffered else to,
    )  # fmt: skip
    assert_within(got[[0, 2]], want[[0, 2]], TOLERANCE, name="o")
    for t in range(4):
        found = buffer[:, t] if buffered else d.pool[to[:, t].clamp(min=0)]
        assert_within(found[[0, 2]], kept[t][[0, 2]], TOLERANCE, name=f"state {t}")


@pytest.mark.parametrize("T", [4, 10])
def test_padding_of_a_captured_graph_writes_no_state(kernels, T):
    """Its slot is -1; where its tokens' states would go is left from another batch."""
    d = Data(2, T)
    before = d.pool.clone()
    to = torch.stack([torch.arange(T) % 2 + 1, torch.arange(T) % 2 + 3]).int()
    if T <= 8:
        to = torch.stack([torch.arange(T) + 1, torch.arange(T) + 5]).int() % P
    kernels["gdn_decode_mtp"][0](
        d.q, d.k, d.v, a=d.a, b=d.b, **d.gates(), initial_state=d.pool,
        initial_state_indices=_ints(1, -1), disable_state_update=False, output_state_indices=to,
    )  # fmt: skip
    others = [i for i in range(P) if i not in to[0].tolist()]
    assert torch.equal(d.pool[others], before[others])
    assert not torch.equal(d.pool[to[0, -1]], before[to[0, -1]])


@pytest.mark.parametrize("T", [4, 10])
def test_a_commit_folds_the_accepted_tokens_of_every_layer(kernels, T):
    B, layers = 3, [Data(3, T), Data(3, T)]
    layers[1].pool = layers[1].pool.flip(0).contiguous()
    payload = torch.stack(
        [
            torch.cat([x.flatten(2) for x in (d.k, d.v, d.a, d.b)], dim=2).flatten(0, 1)
            for d in layers
        ]
    )
    parameters = torch.stack([torch.stack([d.A_log, d.dt_bias]) for d in layers])
    read, write = _ints(1, 2, -1), _ints(1, 5, -1)
    accepted, want, before = [2, T, 1], [], []
    for d in layers:
        before.append(d.pool.clone())
        kept = d.states([1, 2, 0])[1]
        want.append([kept[accepted[0] - 1][0], kept[accepted[1] - 1][1]])
    kernels["gdn_replay_commit"][0](
        payload,
        parameters,
        state_addresses=torch.tensor([d.pool.data_ptr() for d in layers]),
        state_row_strides=torch.tensor([d.pool.stride(0) for d in layers]),
        read_indices=torch.stack([read, read]),
        write_indices=torch.stack([write, write]),
        accepted_length=_ints(*accepted),
        draft_token_num=T,
        num_k_heads=HK,
        num_v_heads=HV,
        head_k_dim=K,
        head_v_dim=V,
        state_dtype=torch.float32,
    )
    for d, wanted, old in zip(layers, want, before, strict=True):
        assert_within(d.pool[1], wanted[0], TOLERANCE, name="row 0")
        assert_within(d.pool[5], wanted[1], TOLERANCE, name="row 1")
        others = [i for i in range(P) if i not in (1, 5)]
        assert torch.equal(d.pool[others], old[others])
    assert len(accepted) == B
