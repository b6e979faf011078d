"""The oracle against the published references of other projects."""

import importlib
import importlib.util
import inspect
from pathlib import Path

import pytest
import torch

from sluice.integrations.transformers import plain_torch
from sluice.testing import oracle
from sluice.testing.compare import assert_same_bits, assert_within


def fla_reference(operator: str):
    """FLA's naive module, loaded from its file: importing the package needs a GPU."""
    spec = importlib.util.find_spec("fla")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("fla-core is not installed")
    pytest.importorskip("einops")
    path = Path(spec.submodule_search_locations[0]) / "ops" / operator / "naive.py"
    spec = importlib.util.spec_from_file_location(f"fla_naive_{operator}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("form", ["recurrent", "chunk"])
def test_fla_gated_delta_rule_agrees(delta_inputs, form):
    module = fla_reference("gated_delta_rule")
    reference = getattr(module, f"naive_{form}_gated_delta_rule")
    x = delta_inputs(T=130, Hq=4, Hk=4, Hv=4, K=16, V=24)
    state = x.pop("state").mT.contiguous()
    want_o, want_state = reference(**x, initial_state=state.float(), output_final_state=True)
    o, after = oracle.delta(**x, state=state, state_layout="kv")
    assert_within(want_o, o, 1e-5, name="o")
    assert_within(want_state, after, 1e-5, name="state")


def test_fla_per_key_decay_agrees(delta_inputs):
    reference = fla_reference("kda").naive_recurrent_kda
    x = delta_inputs(T=70, Hq=2, Hk=2, Hv=4, K=16, V=24, per_key=True)
    state = x.pop("state").mT.contiguous()
    want_o, want_state = reference(**x, initial_state=state.float(), output_final_state=True)
    o, after = oracle.delta(**x, state=state, state_layout="kv")
    assert_within(want_o, o, 1e-5, name="o")
    assert_within(want_state, after, 1e-5, name="state")


@pytest.mark.parametrize("form", ["recurrent", "chunk"])
def test_transformers_gated_delta_rule_agrees(delta_inputs, form):
    modeling = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    # unwrapped: with Triton installed, the name is FLA's kernel, which needs a GPU
    reference = inspect.unwrap(getattr(modeling, f"torch_{form}_gated_delta_rule"))
    x = delta_inputs(T=130, Hq=2, Hk=2, Hv=4, K=16, V=24)
    state = x.pop("state").mT.contiguous()
    x["q"], x["k"] = 2.0 * x["q"], 3.0 * x["k"]
    o, after = oracle.delta(**x, state=state, state_layout="kv", normalize_qk=True)
    q, k = (x[n].repeat_interleave(2, dim=2) for n in ("q", "k"))
    want_o, want_state = reference(
        q, k, x["v"], x["g"], x["beta"], initial_state=state.float(), output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    assert_within(want_o, o, 1e-5, name="o")
    assert_within(want_state, after, 1e-5, name="state")


LAYERS = {
    "split": ("qwen3_5", "Qwen3_5TextConfig", "Qwen3_5GatedDeltaNet"),
    "interleaved": ("qwen3_next", "Qwen3NextConfig", "Qwen3NextGatedDeltaNet"),
}


@pytest.mark.parametrize("order", LAYERS)
def test_step_agrees_with_a_transformers_layer(order):
    pytest.importorskip("transformers")
    package, config_name, layer_name = LAYERS[order]
    root = f"transformers.models.{package}"
    config_module = importlib.import_module(f"{root}.configuration_{package}")
    modeling = importlib.import_module(f"{root}.modeling_{package}")
    Hk, Hv, K, V, hidden = 2, 6, 8, 12, 20
    config = getattr(config_module, config_name)(
        hidden_size=hidden, num_hidden_layers=4, linear_num_key_heads=Hk,
        linear_num_value_heads=Hv, linear_key_head_dim=K, linear_value_head_dim=V,
    )  # fmt: skip
    torch.manual_seed(0)
    layer = getattr(modeling, layer_name)(config, 0).eval()
    torch.nn.init.normal_(layer.dt_bias)
    torch.nn.init.normal_(layer.norm.weight, mean=1.0, std=0.2)
    x = torch.randn(3, 8, hidden)
    D = 2 * Hk * K + Hv * V
    with torch.no_grad(), plain_torch(layer):
        want = layer(x)
        if order == "split":
            qkvz, ba = (
                (layer.in_proj_qkv(x), layer.in_proj_z(x)),
                (layer.in_proj_b(x), layer.in_proj_a(x)),
            )
        else:
            qkvz, ba = layer.in_proj_qkvz(x), layer.in_proj_ba(x)
        y, _, _ = oracle.step(
            qkvz, ba, order=order, conv_weight=layer.conv1d.weight, A_log=layer.A_log,
            dt_bias=layer.dt_bias, norm_weight=layer.norm.weight, eps=layer.layer_norm_epsilon,
            conv_state=torch.zeros(3, D, 3), state=torch.zeros(3, Hv, V, K),
        )  # fmt: skip
        got = y @ layer.out_proj.weight.double().T
    assert_within(want, got, 1e-5, name="y")
    if order == "split":
        joined = torch.cat(qkvz, dim=-1), torch.cat(ba, dim=-1)
        again, _, _ = oracle.step(
            *joined, conv_weight=layer.conv1d.weight, A_log=layer.A_log, dt_bias=layer.dt_bias,
            norm_weight=layer.norm.weight, eps=layer.layer_norm_epsilon,
            conv_state=torch.zeros(3, D, 3), state=torch.zeros(3, Hv, V, K),
        )  # fmt: skip
        assert_same_bits(again, y, "one tensor or a pair")
