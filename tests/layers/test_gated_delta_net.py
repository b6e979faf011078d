"""GatedDeltaNet against transformers' layers, and against itself with tokens divided in any way."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import sluice
from sluice import calls
from sluice.contract.errors import ContractError, SluiceError
from sluice.integrations.transformers import plain_torch
from sluice.layers import (
    PRESETS,
    GatedDeltaNet,
    QwenShape,
    preset,
    shard_channels,
    shard_weights,
)
from sluice.layers.rows import Rows, pack
from sluice.state_pool import PoolGeometry, StatePool
from sluice.testing.compare import (
    FLOAT32_CPU,
    HALF,
    assert_same_bits,
    assert_within,
    relative_error,
)

HIDDEN = 48


@pytest.fixture(autouse=True)
def _inference():
    with torch.no_grad():
        yield


def small(order="split", HK=2, r=2, K=16, V=16, **more):
    return QwenShape(
        "small", HIDDEN, HK, HK * r, 1, (0,), head_k_dim=K, head_v_dim=V, order=order, **more
    )


def random_layer(shape=None, seed=0, **factory):
    from tests.models import randomise

    torch.manual_seed(seed)
    return randomise(GatedDeltaNet(shape or small(), **factory)).requires_grad_(False)


def hidden(*size, seed=1, dtype=torch.float32):
    return torch.randn(*size, HIDDEN, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(actual, exact, name="output", tolerance=FLOAT32_CPU):
    assert_within(actual, exact, tolerance, name=name)


# ---- equal to transformers ----------------------------------------------------------------------


class Pair:
    """A stock layer and ours on the same parameters, each with its own states."""

    def __init__(self, family, B=2, **sizes):
        from tests import models
        from transformers import DynamicCache

        self.stock = models.stock_layer(family, **sizes)
        self.ours = GatedDeltaNet.from_transformers(self.stock)
        self.cache = DynamicCache(config=models.config(family, **sizes))
        self.states = {"state_layout": "kv"}
        self.begin(B)

    def begin(self, B=2):
        """Set the states of both to zero."""
        self.cache.reset()
        conv, state = self.ours.zero_states(B, state_layout="kv")
        self.states.update(conv_state=conv, state=state)

    def both(self, x, mask=None):
        theirs = self.stock(x, cache_params=self.cache, attention_mask=mask)
        return self.ours(x, attention_mask=mask, **self.states), theirs

    def assert_states_equal(self):
        from tests.models import states_of

        conv, state = states_of(self.cache)
        close(self.states["state"], state, "state")
        close(self.states["conv_state"], conv[..., 1:], "conv state")  # W - 1 columns of W


@pytest.fixture(
    params=[
        ("qwen3_next", {"r": 1}),
        ("qwen3_next", {"r": 2, "K": 64, "V": 64}),
        ("qwen3_next", {"r": 3, "V": 24}),
        ("qwen3_5", {"r": 1, "K": 64, "V": 64}),
        ("qwen3_5", {"r": 2, "HK": 1, "V": 8}),
        ("qwen3_5", {"r": 3}),
        ("qwen3_5_moe", {"r": 2}),
        ("qwen3_5_moe", {"r": 3, "HK": 3}),
    ],
    ids=lambda p: "-".join([p[0], *(f"{k}{v}" for k, v in p[1].items())]),
)
def pair(request):
    pytest.importorskip("transformers")
    family, sizes = request.param
    pair = Pair(family, **sizes)
    with plain_torch(pair.stock):
        yield pair


def test_prefill_equals_transformers(pair):
    close(*pair.both(hidden(2, 150)))
    pair.assert_states_equal()


def test_prefill_without_states_equals_transformers(pair):
    x = hidden(2, 70)
    close(pair.ours(x), pair.stock(x))


def test_a_prompt_shorter_than_the_conv_window_equals_transformers(pair):
    for T in (1, 2):
        pair.begin()
        close(*pair.both(hidden(2, T, seed=T)))
        pair.assert_states_equal()


def test_token_by_token_decode_equals_transformers(pair):
    pair.both(hidden(2, 20))
    for t in range(12):
        close(*pair.both(hidden(2, 1, seed=10 + t)), name=f"token {t}")
    pair.assert_states_equal()


def test_multi_token_continuation_equals_transformers(pair):
    """Chunked prefill, and several tokens against a cache: transformers 45513."""
    pair.both(hidden(2, 20))
    for T in (3, 8, 1, 70, 2):
        close(*pair.both(hidden(2, T, seed=T)), name=f"{T} more tokens")
    pair.assert_states_equal()


def test_left_padding_equals_transformers(pair):
    mask = torch.ones(2, 40, dtype=torch.int64)
    mask[0, :13] = 0
    ours, theirs = pair.both(hidden(2, 40), mask)
    close(ours[mask.bool()], theirs[mask.bool()])
    assert (ours[0, :13] == 0).all()
    pair.assert_states_equal()
    close(*pair.both(hidden(2, 1, seed=3)), name="the token after it")


def test_right_padding_equals_the_unpadded_run_where_transformers_does_not_row_27(pair):
    """The state after padding is the state before it; transformers lets padding decay it."""
    from tests.models import states_of

    x = hidden(2, 40)
    mask = torch.ones(2, 40, dtype=torch.int64)
    mask[1, 29:] = 0
    ours, _ = pair.both(x, mask)
    alone = {**pair.states}
    alone["conv_state"], alone["state"] = pair.ours.zero_states(1, state_layout="kv")
    close(ours[1:, :29], pair.ours(x[1:, :29], **alone))
    assert (ours[1, 29:] == 0).all()
    close(pair.states["conv_state"][1:], alone["conv_state"], "conv state")
    close(pair.states["state"][1:], alone["state"], "state")

    stock_conv, stock_state = states_of(pair.cache)
    assert relative_error(stock_state[1:], alone["state"]) > 0.1
    assert relative_error(stock_conv[1:, :, 1:], alone["conv_state"]) > 0.1
    assert relative_error(stock_state[:1], pair.states["state"][:1]) < 1e-5  # the unpadded row

    nxt = hidden(2, 1, seed=5)
    ours, theirs = pair.both(nxt)
    close(ours[1:], pair.ours(nxt[1:], **alone), "the token after it")
    assert relative_error(theirs[1:], ours[1:]) > 0.01


def test_packed_equals_separate_runs_of_transformers_row_29(pair):
    lengths = [5, 0, 67, 1, 12]
    x = hidden(1, sum(lengths))
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    states = pair.ours.zero_states(5)
    packed = pair.ours(x, cu_seqlens=cu_seqlens, conv_state=states[0], state=states[1])
    close(pair.ours(x[0], cu_seqlens=cu_seqlens), packed[0], "no states, no batch dimension")
    for i, part in enumerate(x.split(lengths, dim=1)):
        conv, state = pair.ours.zero_states(1)
        if part.shape[1]:
            where = slice(cu_seqlens[i], cu_seqlens[i + 1])
            close(packed[:, where], pair.stock(part), f"sequence {i}")
            pair.ours(part, conv_state=conv, state=state)
        close(states[1][i : i + 1], state, f"state {i}")
        close(states[0][i : i + 1], conv, f"conv state {i}")
    leaked = pair.stock(x)  # its torch functions mix packed sequences
    assert relative_error(leaked[:, lengths[0] :], packed[:, lengths[0] :]) > 0.01


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5", "qwen3_5_moe"])
def test_bfloat16_is_within_rounding_of_the_float32_layer_row_27(family):
    """Compared with transformers in float32 on the same weights: in bfloat16 it rounds beta."""
    pytest.importorskip("transformers")
    pair = Pair(family, r=3, K=64, V=64)
    ours = GatedDeltaNet.from_transformers(copy.deepcopy(pair.stock).to(torch.bfloat16))
    pair.stock.load_state_dict(ours.state_dict())  # the same rounded weights, in float32
    conv, state = ours.zero_states(2, state_layout="kv")
    with plain_torch(pair.stock):
        for T in (130, 1, 5):
            x = hidden(2, T, seed=T, dtype=torch.bfloat16)
            y = ours(x, conv_state=conv, state=state, state_layout="kv")
            assert y.dtype == torch.bfloat16
            exact = pair.stock(x.float(), cache_params=pair.cache)
            assert_within(y, exact, HALF, name=f"{T} tokens")
    assert_within(state, pair.cache.get_recurrent_state(0), HALF, name="state")


def test_q_and_k_are_never_repeated_to_the_value_heads_row_27():
    layer = random_layer(small(HK=2, r=3))
    conv, state = layer.zero_states(1)
    with calls.check_only() as checked:
        layer(hidden(1, 20), conv_state=conv, state=state)
        layer(hidden(1, 1), conv_state=conv, state=state)
    specs = {spec.op: spec for spec, _ in checked}
    heads = {op: (s.HK, s.HV) for op, s in specs.items() if op != "rms_norm_gated"}
    assert heads == {"conv_qkv": (2, 6), "prefill": (2, 6), "step": (2, 6)}
    assert specs["prefill"].HQ == 2


def test_the_sigmoid_gate_of_qwen4_exp_equals_transformers():
    modeling = pytest.importorskip("transformers.models.qwen4_exp.modeling_qwen4_exp")
    from tests.models import randomise
    from transformers.models.qwen4_exp import Qwen4ExpTextConfig

    config = Qwen4ExpTextConfig(
        hidden_size=HIDDEN,
        linear_num_key_heads=2,
        linear_num_value_heads=6,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        output_gate_type="sigmoid",
    )
    stock = randomise(modeling.Qwen4ExpTextGatedDeltaNet(config, 0)).requires_grad_(False)
    ours = GatedDeltaNet.from_transformers(stock)
    assert ours.shape.gate_activation == "sigmoid"
    with plain_torch(stock):
        close(ours(hidden(2, 30)), stock(hidden(2, 30)))


# ---- weights ------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5", "qwen3_5_moe"])
def test_parameters_are_shared_and_named_as_in_transformers(family):
    pytest.importorskip("transformers")
    from tests import models

    stock = models.stock_layer(family, r=3)
    shared = GatedDeltaNet.from_transformers(stock)
    mine = dict(shared.named_parameters())
    for name, p in stock.named_parameters():
        assert mine.pop(name) is p
    assert not mine

    loaded = GatedDeltaNet.from_config(models.config(family, r=3))
    loaded.load_state_dict(stock.state_dict())
    x = hidden(1, 9)
    assert_same_bits(loaded.requires_grad_(False)(x), shared(x), "loaded and shared")
    stock.out_proj.weight.zero_()
    assert (shared(x) == 0).all()


def test_another_layer_or_activation_is_refused():
    with pytest.raises(ContractError, match=r"layer: expected one of Qwen3Next.*got Linear"):
        GatedDeltaNet.from_transformers(nn.Linear(2, 2))
    pytest.importorskip("transformers")
    from tests.models import stock_layer

    layer = stock_layer("qwen3_5")
    layer.activation = "gelu"
    with pytest.raises(ContractError, match=r"layer\.activation: expected 'silu', got 'gelu'"):
        GatedDeltaNet.from_transformers(layer)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("tp", [1, 2, 16])
def test_every_preset_makes_a_layer(name, tp):
    layer = GatedDeltaNet.from_preset(name, tp=tp, device="meta")
    shape = preset(name, tp)
    assert layer.out_proj.weight.shape == (shape.hidden, shape.num_v_heads * 128)
    assert layer.conv1d.weight.shape == (shape.conv_channels, 1, 4)
    with calls.check_only() as checked:
        layer(torch.empty(1, 9, shape.hidden, device="meta"))
    assert [spec.op for spec, _ in checked] == ["conv_qkv", "prefill", "rms_norm_gated"]


@pytest.mark.parametrize("order", ["split", "interleaved"])
@pytest.mark.parametrize(("HK", "r", "tp"), [(4, 3, 2), (4, 1, 4), (2, 2, 2)])
def test_shards_of_heads_sum_to_the_layer_row_17(order, HK, r, tp):
    """Q, K and V are divided one by one, in weights and conv state: SGLang 23746, 30997."""
    shape = small(order, HK=HK, r=r)
    whole = random_layer(shape)
    x, more = hidden(2, 30), hidden(2, 1, seed=4)
    conv, state = whole.zero_states(2)
    first = whole(x, conv_state=conv, state=state)
    halfway = conv.clone(), state.clone()
    second = whole(more, conv_state=conv, state=state)
    sums = [torch.zeros_like(first), torch.zeros_like(second)]
    for rank in range(tp):
        layer = GatedDeltaNet(shape.shard(tp)).requires_grad_(False)
        layer.load_state_dict(shard_weights(whole.state_dict(), shape, rank=rank, tp=tp))
        own_conv, own_state = layer.zero_states(2)
        sums[0] += layer(x, conv_state=own_conv, state=own_state)
        assert_within(own_state, halfway[1].chunk(tp, 1)[rank], 1e-5, name="state shard")
        own_conv = shard_channels(halfway[0], shape, rank=rank, tp=tp, dim=1)
        sums[1] += layer(more, conv_state=own_conv, state=own_state)
        close(own_conv, shard_channels(conv, shape, rank=rank, tp=tp, dim=1), "conv shard")
    close(sums[0], first)
    close(sums[1], second)


def test_wrong_shards_are_refused():
    shape, weights = small(), random_layer().state_dict()
    with pytest.raises(ContractError, match="rank: expected 0 to 1, got 2"):
        shard_weights(weights, shape, rank=2, tp=2)
    with pytest.raises(ContractError, match="tp: expected a divisor"):
        shard_weights(weights, shape, rank=0, tp=3)
    with pytest.raises(ContractError, match=r"weights: expected names of .*, got gate\.weight"):
        shard_weights({"gate.weight": torch.ones(2)}, shape, rank=0, tp=2)
    with pytest.raises(ContractError, match="128 channels in dimension 1"):
        shard_channels(torch.ones(96, 3), shape, rank=0, tp=2, dim=1)


# ---- states, slots, masks -----------------------------------------------------------------------


@pytest.mark.parametrize("order", ["split", "interleaved"])
@pytest.mark.parametrize("layout", ["vk", "kv"])
def test_pool_rows_are_continued_and_nothing_else_is_touched(order, layout):
    shape = small(order)
    layer = random_layer(shape)
    geometry = PoolGeometry(
        layers=2,
        num_v_heads=4,
        conv_channels=shape.conv_channels,
        head_k_dim=16,
        head_v_dim=16,
        conv_dtype=torch.float32,
    )
    pool = StatePool(geometry, slots=6, state_layout=layout, conv_order="ld")
    conv, state = pool.layer(1)
    conv.fill_(torch.nan)
    state.fill_(torch.nan)
    x, slots = hidden(3, 30), torch.tensor([4, -1, 2])
    at = {"conv_state": conv, "state": state, "slots": slots, "state_layout": layout}
    parts = [layer(x[:, :20], has_state=torch.zeros(3, dtype=torch.bool), **at)]
    parts += [layer(x[:, t : t + 1], **at) for t in range(20, 23)]
    parts += [layer(x[:, 23:], **at)]
    y = torch.cat(parts, dim=1)
    whole = layer(x)
    assert (y[1] == 0).all()
    close(y[[0, 2]], whole[[0, 2]])
    untouched = [0, 1, 3, 5]
    assert state[untouched].isnan().all()
    assert conv[untouched].isnan().all()
    assert (pool.layer(0)[1] == 0).all()


def test_write_slots_leave_the_row_they_read():
    layer = random_layer()
    conv, state = layer.zero_states(4)
    x = hidden(1, 30)
    at = {"conv_state": conv, "state": state}
    layer(x[:, :20], slots=torch.tensor([1]), **at)
    before = conv[1].clone(), state[1].clone()
    for T in (1, 10):  # both paths
        layer(x[:, 20 : 20 + T], slots=torch.tensor([1]), write_slots=torch.tensor([3]), **at)
        assert_same_bits(conv[1], before[0], "conv state read")
        assert_same_bits(state[1], before[1], "state read")
    other = layer.zero_states(1)
    layer(x, conv_state=other[0], state=other[1])
    close(state[3:], other[1], "state written")


MASKS = {
    "both sides": [(3, 25), (0, 30), (7, 30), (0, 11)],
    "one token": [(0, 1), (29, 30), (12, 13), (0, 30)],
    "none at all": [(0, 0), (5, 20), (0, 0), (0, 30)],
}


@pytest.mark.parametrize("spans", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize("order", ["split", "interleaved"])
@pytest.mark.parametrize("kind", [torch.bool, torch.int64, torch.float32])
def test_padding_anywhere_equals_the_unpadded_run_row_27(spans, order, kind):
    """From states that are not zero, and with padding full of large numbers."""
    layer = random_layer(small(order, r=3))
    conv, state = layer.zero_states(4)
    layer(hidden(4, 12, seed=9), conv_state=conv, state=state)
    before = conv.clone(), state.clone()
    x, mask = hidden(4, 30), torch.zeros(4, 30, dtype=kind)
    for i, (a, b) in enumerate(spans):
        mask[i, a:b] = 1
    x = torch.where(mask.bool().unsqueeze(-1), x, 1e4)
    y = layer(x, attention_mask=mask, conv_state=conv, state=state)
    stateless = layer(x, attention_mask=mask)
    assert (y[~mask.bool()] == 0).all()
    for i, (a, b) in enumerate(spans):
        one_conv, one_state = (z[i : i + 1].clone() for z in before)
        if a < b:
            alone = x[i : i + 1, a:b]
            exact = layer(alone, conv_state=one_conv, state=one_state)
            close(y[i : i + 1, a:b], exact, f"row {i}")
            close(stateless[i : i + 1, a:b], layer(alone), f"row {i} without states")
        close(conv[i : i + 1], one_conv, f"conv state {i}")
        close(state[i : i + 1], one_state, f"state {i}")


def test_padding_and_slots_combine():
    layer = random_layer()
    conv, state = layer.zero_states(7)
    conv.fill_(torch.nan)
    state.fill_(torch.nan)
    x, mask = hidden(3, 20), torch.ones(3, 20)
    mask[0, 15:], mask[1, :4] = 0, 0
    y = layer(
        x,
        attention_mask=mask,
        conv_state=conv,
        state=state,
        slots=torch.tensor([0, 5, 3], dtype=torch.int32),
        write_slots=torch.tensor([0, 2, -1], dtype=torch.int32),
        has_state=torch.zeros(3, dtype=torch.bool),
        pad_slot=0,
    )
    assert (y[0] == 0).all()  # slot 0 is padding
    close(y[1, 4:], layer(x[1:2, 4:])[0])
    close(y[2], layer(x[2:])[0])
    written = [i for i in range(7) if not state[i].isnan().any()]
    assert written == [2] == [i for i in range(7) if not conv[i].isnan().any()]


def test_a_masked_single_token_leaves_its_row_alone():
    layer = random_layer()
    conv, state = layer.zero_states(3)
    layer(hidden(3, 9, seed=2), conv_state=conv, state=state)
    before = conv.clone(), state.clone()
    mask = torch.tensor([[1], [0], [1]])
    x = hidden(3, 1)
    y = layer(x, attention_mask=mask, conv_state=conv, state=state)
    assert (y[1] == 0).all()
    assert_same_bits(state[1], before[1][1], "state of the masked row")
    assert_same_bits(conv[1], before[0][1], "conv state of the masked row")
    exact = layer(x, conv_state=before[0], state=before[1])
    assert_same_bits(y[[0, 2]], exact[[0, 2]], "the others")
    assert (layer(x, attention_mask=mask)[1] == 0).all()


def test_checkpoints_of_both_states_resume_under_padding():
    layer = random_layer()
    x, mask = hidden(2, 40), torch.ones(2, 40)
    mask[0, 33:], mask[1, :6] = 0, 0
    conv, state = layer.zero_states(8)
    kept = sluice.Checkpoints(
        torch.tensor([[4, 5], [6, -1]]), positions=torch.tensor([[0, 17], [32, 1]])
    )
    layer(x, attention_mask=mask, conv_state=conv, state=state, checkpoints=kept)
    for slot, row in ((5, x[:1, :17]), (6, x[1:, 6:38])):
        one_conv, one_state = layer.zero_states(1)
        layer(row, conv_state=one_conv, state=one_state)
        close(state[slot : slot + 1], one_state, f"slot {slot}")
        close(conv[slot : slot + 1], one_conv, f"conv slot {slot}")
    assert (state[7] == 0).all()


def test_one_token_a_row_may_come_without_a_token_dimension():
    layer = random_layer()
    states = [layer.zero_states(3) for _ in range(2)]
    x = hidden(3, 1)
    with_dim = layer(x, conv_state=states[0][0], state=states[0][1])
    without = layer(x[:, 0], conv_state=states[1][0], state=states[1][1])
    assert_same_bits(without, with_dim[:, 0], "output")
    assert_same_bits(states[0][1], states[1][1], "state")


def test_an_empty_batch_and_no_tokens_give_empty_outputs_row_14():
    layer = random_layer()
    assert layer(hidden(0, 5)).shape == (0, 5, HIDDEN)
    conv, state = layer.zero_states(2)
    layer(hidden(2, 5), conv_state=conv, state=state)
    before = state.clone()
    assert layer(hidden(2, 0), conv_state=conv, state=state).shape == (2, 0, HIDDEN)
    assert_same_bits(state, before, "state")


def test_what_cannot_be_served_is_refused_by_name():
    layer = random_layer()
    x, mask = hidden(2, 12), torch.ones(2, 12)
    conv, state = layer.zero_states(2)
    hole = mask.clone()
    hole[1, 4:6] = 0
    cases = [
        ({"attention_mask": hole}, r"attention_mask: .*neighbouring.*a hole in row 1"),
        ({"attention_mask": mask[:, :5]}, r"attention_mask: expected shape \[2, 12\]"),
        ({"state": state}, "conv_state: expected a tensor"),
        ({"conv_state": conv}, "state: expected a tensor"),
        ({"slots": torch.tensor([0, 1])}, "slots: expected states beside it"),
        ({"conv_state": conv[:1], "state": state}, "at least 2 rows"),
        ({"attention_mask": mask, "cu_seqlens": torch.tensor([0, 24])}, "None beside cu_seqlens"),
        (
            {"attention_mask": mask, "conv_state": conv, "state": state, "pad_slot": 0},
            "pad_slot: expected slots beside it",
        ),
    ]
    for options, message in cases:
        with pytest.raises(ContractError, match=message):
            layer(x, **options)
    with pytest.raises(ContractError, match=r"hidden_states: expected shape \[B, T, 48\]"):
        layer(x[..., :40])


# ---- torch --------------------------------------------------------------------------------------


def test_backward_through_states_in_place_is_refused_and_never_silently_zero():
    layer = random_layer().requires_grad_(True)
    for T in (12, 3):  # prefill, and step
        conv_state, state = layer.zero_states(1)
        with torch.enable_grad():
            y = layer(hidden(1, T), conv_state=conv_state, state=state)
            assert y.requires_grad
            with pytest.raises(SluiceError, match="no gradient is defined through tensors that"):
                y.sum().backward()


def test_nothing_is_read_back_to_the_host_for_padding_row_31():
    """Fake tensors have no values, so reading one raises."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        layer = GatedDeltaNet(small())
        conv, state = layer.zero_states(3)
        live = torch.ones(2, 20, dtype=torch.bool)
        rows = pack(live, Rows(slots=torch.tensor([2, 0])))
        assert rows.cu_seqlens.shape == (7,)
        y = layer(
            torch.empty(2, 20, HIDDEN),
            attention_mask=torch.ones(2, 20),
            conv_state=conv,
            state=state,
        )
        assert y.shape == (2, 20, HIDDEN)


class Stateful(nn.Module):
    """A layer whose states are arguments, as torch.export wants them."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, conv_state, state, mask=None):
        return self.layer(x, attention_mask=mask, conv_state=conv_state, state=state)


@pytest.mark.parametrize("order", ["split", "interleaved"])
def test_compile_without_graph_breaks_gives_the_same(order):
    layer = random_layer(small(order))
    compiled = torch.compile(Stateful(layer), fullgraph=True, backend="aot_eager")
    states, expected = layer.zero_states(2), layer.zero_states(2)
    mask = torch.ones(2, 20)
    mask[1, 14:] = 0
    for x, m in ((hidden(2, 20), mask), (hidden(2, 1, seed=3), None), (hidden(2, 12), None)):
        exact = layer(x, attention_mask=m, conv_state=expected[0], state=expected[1])
        close(compiled(x, *states, m), exact)
    close(states[1], expected[1], "state")
    close(states[0], expected[0], "conv state")


@pytest.mark.parametrize("T", [1, 20])
def test_export_gives_the_same(T):
    layer = random_layer()
    x, mask = hidden(2, T), torch.ones(2, T)
    args = (x, *layer.zero_states(2), mask)
    program = torch.export.export(Stateful(layer), args)
    states, expected = layer.zero_states(2), layer.zero_states(2)
    mask[0, : T // 3] = 0
    y = program.module()(x, *states, mask)
    close(y, layer(x, attention_mask=mask, conv_state=expected[0], state=expected[1]))
    close(states[1], expected[1], "state")


def test_repr_names_the_shape():
    assert "heads=2/4, K=16, V=16, W=4, order='split'" in repr(GatedDeltaNet(small()))
