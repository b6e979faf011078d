"""Careless calls of what is not an operator: each is answered with what was expected."""

from __future__ import annotations

import pytest
import torch

import sluice
from sluice.contract.errors import ContractError
from sluice.layers import PRESETS

CONFIG = {
    "model_type": "qwen3_5_text",
    "hidden_size": 64,
    "num_hidden_layers": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "hidden_act": "silu",
}


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: sluice.accelerate("Qwen3.5-4B"), "a loaded model.*, got 'Qwen3.5-4B'"),
        (lambda: sluice.restore({}), "a loaded model.*, got dict"),
        (lambda: sluice.StatePool.for_model(None, slots=1), "QwenShape.*config, got NoneType"),
        (lambda: sluice.StatePool.for_model(3, slots=1), "config, got int"),
        (
            lambda: sluice.StatePool.for_model("Qwen3.5-4B", slots=1, state_dtype="bfloat16"),
            "state_dtype: expected one of torch.float32, torch.bfloat16.*, got 'bfloat16'",
        ),
        (
            lambda: sluice.StatePool.for_model("Qwen3.5-0.8B", slots=1, device="cuda:99"),
            "StatePool: device: expected a device of this machine, got 'cuda:99': .+",
        ),
        (
            lambda: sluice.StatePool.for_model("Qwen3.5-0.8B", slots=1).load(3),
            "load: path: expected a path, got 3",
        ),
    ],
)
def test_a_careless_call_is_answered_with_what_was_expected(call, words):
    with pytest.raises(ContractError, match=words):
        call()


def test_a_dtype_that_another_tensor_decides_is_told_with_its_name():
    x = torch.ones(1, 4, 1, 4)
    with pytest.raises(ContractError, match="k: expected dtype bfloat16 = q's"):
        sluice.prefill(x.bfloat16(), x, x)


def test_a_slot_given_twice_is_a_fault_of_slots():
    x, pool = torch.ones(2, 1, 1, 4), torch.zeros(3, 1, 4, 4)
    twice = torch.tensor([1, 1])
    with pytest.raises(ContractError, match="decode: slots: expected no slot twice"):
        sluice.decode(x, x, x, state=pool, slots=twice)
    with pytest.raises(ContractError, match="decode: write_slots: expected no slot twice"):
        sluice.decode(x, x, x, state=pool, slots=torch.tensor([0, 2]), write_slots=twice)


class Config:
    """As transformers has it: attributes, and the text part of a multimodal model inside."""

    def __init__(self, **values):
        self.__dict__.update(values)


@pytest.mark.parametrize(
    "config", [CONFIG, Config(**CONFIG), Config(model_type="qwen3_5", text_config=Config(**CONFIG))]
)
def test_a_pool_is_made_from_a_config_of_transformers(config):
    pool = sluice.StatePool.for_model(config, slots=3, tp=2)
    assert pool.layer(5)[0].shape == (3, 2 * 32 + 3 * 16, 3)
    assert pool.layer(5)[1].shape == (3, 3, 16, 32)
    assert sluice.StatePool.bytes_per_sequence(config, tp=2) == pool.geometry.bytes_per_sequence


def test_a_pool_is_made_from_the_config_of_a_real_model():
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3_5TextConfig(
        **{k: v for k, v in CONFIG.items() if k != "model_type"}
    )
    assert sluice.StatePool.for_model(config, slots=1).geometry.num_v_heads == 6


@pytest.mark.parametrize(
    ("said", "want"),
    [
        ({}, torch.float32),
        ({"dtype": torch.float32}, torch.float32),
        ({"dtype": "bfloat16"}, torch.bfloat16),
        ({"torch_dtype": torch.float16}, torch.float16),
        ({"dtype": None, "torch_dtype": "float16"}, torch.float16),
    ],
)
def test_a_conv_window_has_the_dtype_of_the_models_activations(said, want):
    for config in (CONFIG | said, Config(**CONFIG | said)):
        pool = sluice.StatePool.for_model(config, slots=1)
        assert pool.geometry.conv_dtype == want
        size = sluice.StatePool.bytes_per_sequence(config)
        assert size == pool.geometry.bytes_per_sequence
    inside = Config(model_type="qwen3_5", text_config=Config(**CONFIG), **said)
    assert sluice.StatePool.for_model(inside, slots=1).geometry.conv_dtype == want
    given = sluice.StatePool.for_model(CONFIG | said, slots=1, conv_dtype=torch.bfloat16)
    assert given.geometry.conv_dtype == torch.bfloat16


def test_the_old_name_of_a_dtype_is_not_asked_of_a_config_that_warns_of_it():
    class Deprecating(Config):
        @property
        def torch_dtype(self):
            raise AssertionError("torch_dtype is deprecated")

    pool = sluice.StatePool.for_model(Deprecating(**CONFIG), slots=1)
    assert pool.geometry.conv_dtype == torch.float32


def test_a_dtype_that_no_window_has_is_asked_about():
    with pytest.raises(ContractError, match=r"config\.dtype: expected .* or give conv_dtype"):
        sluice.StatePool.for_model(CONFIG | {"dtype": "float8_e4m3fn"}, slots=1)


def test_doctor_says_first_that_there_is_no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    text = sluice.doctor("cpu")
    (hopper,) = (line for line in text.splitlines() if line.split()[:1] == ["hopper"])
    assert hopper.split(maxsplit=1)[1] == "unavailable: no CUDA device"


def test_doctor_shows_the_version():
    assert sluice.doctor("cpu").splitlines()[0] == f"sluice {sluice.__version__}"
    assert "Qwen3.5-4B" in PRESETS
