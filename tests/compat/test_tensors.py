"""A list or an array in place of a tensor is refused by its argument's name."""

from __future__ import annotations

import inspect

import pytest
import torch

from sluice.compat import causal_conv1d, fla, fla_modules, flashinfer
from sluice.contract.errors import ContractError

FUNCTIONS = [
    *(getattr(fla, name) for name in ("chunk_gated_delta_rule", "chunk_kda", "causal_conv1d")),
    *(getattr(fla, f"fused_recurrent_{rule}") for rule in ("gated_delta_rule", "kda")),
    fla.causal_conv1d_update,
    fla_modules.rms_norm_gated,
    *(getattr(flashinfer, name) for name in flashinfer.__all__),
    *(getattr(causal_conv1d, f"causal_conv1d_{name}") for name in ("fn", "update")),
    causal_conv1d.causal_conv1d_varlen_states,
]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f"{f.__module__}.{f.__name__}")
def test_a_list_is_refused_by_name(function):
    needed = [
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
    ]
    given = dict.fromkeys(needed, torch.ones(1, 1, 1, 1))
    with pytest.raises(ContractError, match=rf"\b{needed[0]}: expected a tensor, got \[1.0\]"):
        function(**given | {needed[0]: [1.0]})


@pytest.mark.parametrize("name", ["gk", "beta"])
def test_a_list_of_decays_is_refused_by_name(name):
    q = torch.ones(1, 2, 1, 4)
    with pytest.raises(ContractError, match=f"{name}: expected a tensor, got"):
        fla.fused_recurrent_gated_delta_rule(q, q, q, **{name: [1.0]})


def test_a_tensor_of_other_dimensions_is_refused_by_name():
    q, g = torch.ones(1, 2, 1, 4), torch.ones(1, 2, 1)
    with pytest.raises(ContractError, match=r"k: expected \[B, T, heads, width\], got shape"):
        fla.chunk_gated_delta_rule(q, q[0], q, g, g)
