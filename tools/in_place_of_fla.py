"""A pytest plugin that puts sluice's functions in place of FLA's before a test file imports them.

    PYTHONPATH=src:tools:DIR python -m pytest -p in_place_of_fla DIR/tests/ops/test_gdn.py

DIR is a checkout of FLA's repository. docs/compat.md has the counts of its tests.
"""

from __future__ import annotations

import importlib

import sluice.compat.fla as ours

MODULES = (
    "fla.ops.gated_delta_rule",
    "fla.ops.gated_delta_rule.chunk",
    "fla.ops.gated_delta_rule.fused_recurrent",
    "fla.ops.kda",
    "fla.ops.kda.chunk",
    "fla.ops.kda.fused_recurrent",
    "fla.modules.convolution",
    "fla.modules",
    "fla.modules.fused_norm_gate",
    "fla.modules.layernorm_gated",
)
NAMES = (
    "chunk_gated_delta_rule",
    "fused_recurrent_gated_delta_rule",
    "chunk_kda",
    "fused_recurrent_kda",
    "causal_conv1d",
    "causal_conv1d_update",
    "ShortConvolution",
    "FusedRMSNormGated",
    "rms_norm_gated",
)


def replaced() -> dict[str, list[str]]:
    """The names put in place of FLA's, by module."""
    done: dict[str, list[str]] = {}
    for where in MODULES:
        try:
            module = importlib.import_module(where)
        except ModuleNotFoundError:  # a release that keeps it elsewhere
            continue
        for name in NAMES:
            if callable(getattr(module, name, None)):  # not a submodule of that name
                setattr(module, name, getattr(ours, name))
                done.setdefault(where, []).append(name)
    return done


def pytest_report_header() -> list[str]:
    return [f"sluice in place of {where}: {', '.join(names)}" for where, names in DONE.items()]


DONE = replaced()
