"""The table of Qwen shapes against published figures, and the functions that read it."""

from __future__ import annotations

import dataclasses
import types

import pytest

from sluice.contract.errors import ContractError
from sluice.layers.qwen import ALIASES, PRESETS, QwenShape, from_config, linear_layers_of, preset

# name: hidden, layers, linear, Hk, Hv, r, conv channels; written out, not computed
PUBLISHED = {
    "Qwen3-Next-80B-A3B": (2048, 48, 36, 16, 32, 2, 8192),
    "Qwen3.5-0.8B": (1024, 24, 18, 16, 16, 1, 6144),
    "Qwen3.5-2B": (2048, 24, 18, 16, 16, 1, 6144),
    "Qwen3.5-4B": (2560, 32, 24, 16, 32, 2, 8192),
    "Qwen3.5-9B": (4096, 32, 24, 16, 32, 2, 8192),
    "Qwen3.5-27B": (5120, 64, 48, 16, 48, 3, 10240),
    "Qwen3.5-35B-A3B": (2048, 40, 30, 16, 32, 2, 8192),
    "Qwen3.5-122B-A10B": (3072, 48, 36, 16, 64, 4, 12288),
    "Qwen3.5-397B-A17B": (4096, 60, 45, 16, 64, 4, 12288),
    "Qwen3.6-27B": (5120, 64, 48, 16, 48, 3, 10240),
    "Qwen3.6-35B-A3B": (2048, 40, 30, 16, 32, 2, 8192),
    "Qwen3.8-27B": (5120, 64, 48, 16, 48, 3, 10240),
    "Qwen3.8-2.4T": (8192, 92, 69, 16, 128, 8, 20480),
    "Qwen3.8-Flash-Next": (2560, 48, 36, 16, 48, 3, 10240),
}


def test_the_table_has_the_published_models_and_no_others():
    assert set(PRESETS) == set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_has_the_published_figures(name):
    s = preset(name)
    figures = (s.hidden, s.layers, s.linear_layers, s.num_k_heads, s.num_v_heads, s.r)
    assert (*figures, s.conv_channels) == PUBLISHED[name]
    assert (s.head_k_dim, s.head_v_dim, s.conv_width, s.tp) == (128, 128, 4, 1)


def test_only_qwen3_next_is_interleaved_and_only_flash_next_gates_with_sigmoid():
    interleaved = {s.name for s in PRESETS.values() if s.order == "interleaved"}
    sigmoid = {s.name for s in PRESETS.values() if s.gate_activation == "sigmoid"}
    assert interleaved == {"Qwen3-Next-80B-A3B"}
    assert sigmoid == {"Qwen3.8-Flash-Next"}


def test_every_fourth_layer_is_not_linear():
    assert preset("qwen3.5-0.8b").linear_layer_ids[:7] == (0, 1, 2, 4, 5, 6, 8)
    assert 23 not in preset("qwen3.5-0.8b").linear_layer_ids
    assert linear_layers_of(6, interval=3) == (0, 1, 3, 4)


def test_linear_index_counts_linear_layers_only():
    shape = preset("qwen3.5-9b")
    assert [shape.linear_index(i) for i in (0, 2, 4, 30)] == [0, 2, 3, 23]
    for layer in (3, 31, 32, -1):
        with pytest.raises(ContractError, match=f"got {layer}"):
            shape.linear_index(layer)


@pytest.mark.parametrize(
    "spelling",
    [
        "qwen3.5-27b",
        "QWEN3.5-27B",
        "qwen3_5_27b",
        "Qwen3_5-27B",
        "Qwen/Qwen3.5-27B",
        "Qwen/Qwen3.5-27B-FP8",
        "Qwen3.5-27B-Base",
    ],
)
def test_spelling_of_a_name_does_not_matter(spelling):
    assert preset(spelling) == PRESETS["Qwen3.5-27B"]


def test_names_stay_distinct_when_spelling_is_ignored():
    for name in PRESETS:
        assert preset(name).name == name
    for alias, name in ALIASES.items():
        assert preset(alias).name == name
    assert preset("Qwen/Qwen3-Next-80B-A3B-Instruct").name == "Qwen3-Next-80B-A3B"
    assert preset("Qwen/Qwen3-Coder-Next-FP8").name == "Qwen3-Next-80B-A3B"


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("qwen3.5-27", "Qwen3.5-27B"),
        ("qwen3.5-35b", "Qwen3.5-35B-A3B"),
        ("qwen35-397b-a17", "Qwen3.5-397B-A17B"),
        ("qwen3.8-flash", "Qwen3.8-Flash-Next"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(wrong, meant):
    with pytest.raises(ContractError, match=f"did you mean '{meant}'") as caught:
        preset(wrong)
    assert repr(wrong) in str(caught.value)


def test_what_is_no_name_is_refused():
    with pytest.raises(ContractError, match="preset: name: expected a model's name, got None"):
        preset(None)


@pytest.mark.parametrize("name", ["", "llama-7b", "???"])
def test_a_name_like_no_other_is_answered_with_all(name):
    with pytest.raises(ContractError, match=r"Qwen3\.5-0\.8B, .*Qwen3\.8-2\.4T"):
        preset(name)


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16])
def test_a_shard_keeps_r_and_divides_every_width(name, tp):
    whole, shard = preset(name), preset(name, tp=tp)
    assert shard.r == whole.r
    assert shard.num_k_heads * tp == whole.num_k_heads
    assert shard.conv_channels * tp == whole.conv_channels
    assert shard.value_dim * tp == whole.value_dim
    assert (shard.hidden, shard.linear_layer_ids, shard.tp) == (
        whole.hidden,
        whole.linear_layer_ids,
        tp,
    )


def test_sharding_twice_is_sharding_by_the_product():
    assert preset("qwen3.5-27b").shard(2).shard(4) == preset("qwen3.5-27b").shard(8)


@pytest.mark.parametrize("tp", [0, -1, 3, 5, 32])
def test_a_tp_that_does_not_divide_both_counts_is_refused(tp):
    # 3 divides the 48 value heads of the 27B, but not its 16 key heads
    with pytest.raises(ContractError, match=f"16 key heads and 48 value heads.*got {tp}"):
        preset("qwen3.5-27b", tp=tp)


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"num_v_heads": 24}, "num_v_heads"),
        ({"num_k_heads": 0}, "num_k_heads"),
        ({"conv_width": 1}, "conv_width"),
        ({"order": "mixed"}, "order"),
        ({"gate_activation": "relu"}, "gate_activation"),
        ({"linear_layer_ids": (0, 64)}, "linear_layer_ids"),
        ({"linear_layer_ids": (1, 0)}, "linear_layer_ids"),
    ],
)
def test_an_impossible_shape_is_refused_by_name(change, argument):
    with pytest.raises(ContractError, match=argument):
        dataclasses.replace(preset("qwen3.5-27b"), **change)


def test_a_shape_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        preset("qwen3.5-27b").num_v_heads = 1


def small_config(**changes):
    config = {
        "model_type": "qwen3_5_text",
        "hidden_size": 64,
        "num_hidden_layers": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 3,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
    }
    return config | changes


def test_a_config_is_read_as_mapping_and_as_object_and_nested():
    plain = from_config(small_config())
    assert plain == QwenShape(
        name="qwen3_5_text",
        hidden=64,
        num_k_heads=2,
        num_v_heads=6,
        layers=8,
        linear_layer_ids=(0, 1, 2, 4, 5, 6),
        head_k_dim=16,
        head_v_dim=32,
        conv_width=3,
        norm_eps=1e-5,
    )
    inner = types.SimpleNamespace(**small_config())
    assert from_config(inner) == plain
    assert from_config(types.SimpleNamespace(model_type="qwen3_5", text_config=inner)) == plain
    assert from_config({"model_type": "qwen3_5", "text_config": small_config()}) == plain


def test_layer_types_of_a_config_decide_which_layers_are_linear():
    kinds = ["full_attention", *["linear_attention"] * 7]
    assert from_config(small_config(layer_types=kinds)).linear_layer_ids == tuple(range(1, 8))
    assert from_config(small_config(full_attention_interval=2)).linear_layer_ids == (0, 2, 4, 6)


def test_the_output_gate_is_read_only_where_the_model_reads_it():
    gate = {"output_gate_type": "sigmoid"}
    assert from_config(small_config(**gate, model_type="qwen4_exp_text")).gate_activation == (
        "sigmoid"
    )
    assert from_config(small_config(**gate)).gate_activation == "silu"
    assert from_config(small_config(model_type="qwen4_exp_text")).gate_activation == "silu"


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"model_type": "llama"}, "model_type"),
        ({"linear_num_value_heads": None}, r"config\.linear_num_value_heads"),
        ({"hidden_act": "gelu"}, r"config\.hidden_act"),
        (
            {"model_type": "qwen4_exp_text", "output_gate_type": "tanh"},
            r"config\.output_gate_type",
        ),
    ],
)
def test_a_config_that_cannot_be_served_is_refused_by_attribute(change, argument):
    with pytest.raises(ContractError, match=argument):
        from_config(small_config(**change))


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        ("qwen3_next", "Qwen3-Next-80B-A3B"),
        ("qwen3_5", "Qwen3.5-9B"),
        ("qwen3_5_text", "Qwen3.5-9B"),
        ("qwen3_5_moe", "Qwen3.5-35B-A3B"),
        ("qwen3_5_moe_text", "Qwen3.5-35B-A3B"),
    ],
)
def test_transformers_default_configs_are_the_presets(model_type, name):
    auto = pytest.importorskip("transformers.models.auto.configuration_auto")
    shape = from_config(auto.CONFIG_MAPPING[model_type]())
    assert dataclasses.replace(shape, name=name) == PRESETS[name]
