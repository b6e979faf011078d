"""The contract's cases by name: one table that runs on every backend.

    for case, dtype in pairs("prefill", "decode"):
        inputs = case.inputs(dtype)
        expected = case.expected(inputs)
        case.check(case.run(sluice, inputs, backend="reference"), expected)

Shapes are small: the whole table takes seconds on a token-by-token backend. ``register`` adds
larger cases, which use the same generators, oracle and counts.
"""

from __future__ import annotations

from typing import Any

import torch

from sluice.testing.case import OPS, Case

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
ALL = (FP32, BF16, FP16)
SHORT = {FP32: "fp32", BF16: "bf16", FP16: "fp16", torch.float64: "fp64"}

CASES: dict[str, Case] = {}


def register(*cases: Case) -> None:
    """Add cases; every name must be new."""
    for case in cases:
        if case.name in CASES:
            raise ValueError(f"two cases are named {case.name!r}")
        CASES[case.name] = case


def select(*ops: str) -> list[Case]:
    """The cases of some operators, or all of them."""
    unknown = set(ops) - set(OPS)
    if unknown:
        raise ValueError(f"ops must be among {OPS}, got {sorted(unknown)}")
    return [case for case in CASES.values() if not ops or case.op in ops]


def pairs(*ops: str) -> list[tuple[Case, torch.dtype]]:
    """Every case of some operators with each of its dtypes."""
    return [(case, dtype) for case in select(*ops) for dtype in case.dtypes]


def label(case: Case, dtype: torch.dtype) -> str:
    """An id for a test or a row of a table."""
    return f"{case.name}-{SHORT[dtype]}"


def _each(op: str, defaults: dict[str, Any], table: dict[str, dict[str, Any]]) -> None:
    register(*(Case(f"{op}/{name}", op, **(defaults | row)) for name, row in table.items()))


# -------------------------------------------------------------------------------------- prefill
# 195 tokens are three chunks of 64 and three more; the state is not zero unless a row says so.

PREFILL = {"batch": 1, "tokens": 195, "normalize": True}

_each("prefill", PREFILL, {
    # lengths
    "T1": {"tokens": 1, "dtypes": ALL},
    "T2": {"tokens": 2},
    "T63": {"tokens": 63},
    "T64": {"tokens": 64, "dtypes": ALL},
    "T65": {"tokens": 65, "dtypes": ALL},
    "T127": {"tokens": 127},
    "T4097": {"tokens": 4097, "Hk": 1, "Hv": 2, "dtypes": (FP32, BF16)},
    "T0": {"tokens": 0, "batch": 2},
    "N0": {"batch": 0, "tokens": 8, "state": "rows"},
    # rules and gates
    "linear": {"rule": "linear", "dtypes": ALL},
    "gated": {"rule": "gated", "dtypes": ALL},
    "delta": {"rule": "delta", "dtypes": ALL},
    "gated_delta": {"dtypes": ALL},
    "gated_raw": {"rule": "gated", "raw": True},
    "gated_per_key": {"rule": "gated", "per_key": True},
    "gated_per_key_raw": {"rule": "gated", "per_key": True, "raw": True},
    "per_key": {"per_key": True, "dtypes": ALL},
    "per_key_raw": {"per_key": True, "raw": True, "dtypes": (FP32, BF16)},
    "raw": {"raw": True, "dtypes": ALL},
    "neg_eigval": {"raw": True, "neg_eigval": True, "dtypes": (FP32, BF16)},
    "neg_eigval_per_key": {"raw": True, "neg_eigval": True, "per_key": True},
    "scale": {"scale": 0.37},
    "unit_keys_given": {"normalize": False, "dtypes": ALL},
    # hard keys, hard gates
    "correlated_keys": {"keys": "correlated", "beta_one": True, "dtypes": ALL},
    "repeated_keys": {"keys": "repeated", "beta_one": True, "dtypes": ALL},
    "identical_keys": {"keys": "identical", "beta_one": True, "dtypes": ALL},
    "identical_keys_no_decay": {"keys": "identical", "beta_one": True, "rule": "delta"},
    "identical_keys_given": {"keys": "identical", "beta_one": True, "normalize": False},
    "identical_keys_per_key": {"keys": "identical", "beta_one": True, "per_key": True},
    "weak_gates": {"gates": "weak", "dtypes": (FP32, BF16)},
    "strong_gates": {"gates": "strong", "dtypes": (FP32, BF16)},
    "mixed_gates": {"gates": "mixed", "dtypes": ALL},
    "mixed_gates_raw": {"gates": "mixed", "raw": True, "dtypes": (FP32, BF16)},
    "strong_gates_per_key": {"gates": "strong", "per_key": True},
    "mixed_gates_per_key": {"gates": "mixed", "per_key": True, "raw": True},
    # heads
    "r1": {"Hk": 2, "Hv": 2},
    "r2": {"Hk": 2, "Hv": 4},
    "r3": {"Hk": 2, "Hv": 6, "dtypes": ALL},
    "r4": {"Hk": 2, "Hv": 8},
    "r8": {"Hk": 1, "Hv": 8},
    "one_key_head": {"Hk": 1, "Hv": 2},
    "three_key_heads": {"Hk": 3, "Hv": 3},
    "sixteen_key_heads": {"Hk": 16, "Hv": 16, "tokens": 65},
    "sixteen_by_48": {"Hk": 16, "Hv": 48, "tokens": 65, "dtypes": (FP32, BF16)},
    "fewer_queries": {"Hq": 1, "Hk": 2, "Hv": 4},
    "queries_per_value_head": {"Hq": 4, "Hk": 2, "Hv": 4},
    "grouped_queries": {"Hq": 8, "Hk": 2, "Hv": 2, "dtypes": ALL},
    "grouped_queries_linear": {"Hq": 6, "Hk": 2, "Hv": 2, "rule": "linear"},
    # widths
    "K64_V64": {"K": 64, "V": 64},
    "K128_V128": {"K": 128, "V": 128, "dtypes": ALL},
    "K256_V256": {"K": 256, "V": 256, "Hk": 1, "Hv": 2, "dtypes": (FP32, BF16)},
    "K64_V128": {"K": 64, "V": 128},
    "K256_V64": {"K": 256, "V": 64, "Hk": 1, "Hv": 1},
    "K48_V80": {"K": 48, "V": 80, "dtypes": ALL},
    "K80_V48": {"K": 80, "V": 48, "Hk": 3, "Hv": 9},
    "K33_V17": {"K": 33, "V": 17},
    # packed sequences
    "packed": {"lengths": (65, 1, 130, 64), "dtypes": ALL},
    "packed_flat": {"lengths": (3, 70), "flat": True, "index_dtype": torch.int64},
    "packed_host_lengths": {"lengths": (64, 100), "host_lengths": True},
    "packed_empty_first": {"lengths": (0, 70, 5)},
    "packed_empty_middle": {"lengths": (70, 0, 0, 5)},
    "packed_empty_last": {"lengths": (5, 70, 0)},
    "packed_all_empty": {"lengths": (0, 0)},
    "packed_none": {"lengths": (), "state": "rows"},
    "packed_tail": {"lengths": (66, 9), "tail": 13},
    "packed_none_with_tail": {"lengths": (), "tail": 5, "state": "none"},
    "packed_empty_new": {"lengths": (0, 70, 0), "new": (0,), "moved": True},
    "packed_raw": {"lengths": (65, 0, 70), "raw": True, "strided": True, "flat": True},
    "packed_per_key": {"lengths": (65, 0, 70), "per_key": True, "flat": True},
    "packed_moved": {"lengths": (65, 0, 3), "moved": True, "index_dtype": torch.int64},
    "packed_padded": {"lengths": (65, 7, 0, 30), "padded": (1, 2), "tail": 4},
    "packed_without_state": {"lengths": (65, 0, 7), "state": "none"},
    "packed_many": {"lengths": (1, 2, 3, 1, 64, 0, 5, 63), "Hk": 1, "Hv": 2},
    # pools
    "state_none": {"batch": 2, "tokens": 70, "state": "none", "dtypes": ALL},
    "state_none_kv": {"batch": 2, "tokens": 70, "state": "none", "state_layout": "kv"},
    "state_rows": {"batch": 2, "tokens": 70, "state": "rows"},
    "state_kv": {"state_layout": "kv", "dtypes": ALL, "K": 48, "V": 80},
    "state_bf16": {"state_dtype": BF16, "dtypes": (FP32, BF16)},
    "state_fp16": {"state_dtype": FP16, "dtypes": (FP32, FP16)},
    "state_bf16_kv_moved": {"state_dtype": BF16, "state_layout": "kv", "moved": True, "batch": 2,
                            "dtypes": (BF16,)},
    "moved": {"batch": 3, "tokens": 66, "moved": True},
    "unkept": {"batch": 3, "tokens": 66, "unkept": (1,)},
    "new_rows": {"batch": 3, "tokens": 66, "new": (0, 2), "dtypes": ALL},
    "padded_rows": {"batch": 5, "tokens": 66, "padded": (0, 3), "dtypes": ALL},
    "padded_rows_slot0": {"batch": 4, "tokens": 66, "padded": (1, 2), "pad_slot": 0},
    "all_padded": {"batch": 2, "tokens": 66, "padded": (0, 1)},
    "everything_at_once": {"lengths": (65, 0, 9, 130, 2), "tail": 3, "moved": True, "padded": (2,),
                           "unkept": (4,), "new": (1, 3), "pad_slot": 0, "gap": 24, "raw": True,
                           "strided": True, "state_layout": "kv", "dtypes": ALL},
    "padded_stride": {"batch": 2, "tokens": 66, "gap": 64},
    # arrangement
    "bhtd": {"batch": 2, "tokens": 70, "layout": "bhtd", "dtypes": (FP32, BF16)},
    "bhtd_per_key": {"batch": 2, "tokens": 70, "layout": "bhtd", "per_key": True, "raw": True},
    "bhtd_packed": {"lengths": (65, 5), "layout": "bhtd"},
    "bhtd_flat": {"lengths": (65, 5), "layout": "bhtd", "flat": True},
    "strided": {"batch": 2, "strided": True, "dtypes": ALL},
    "strided_raw": {"batch": 2, "strided": True, "raw": True, "dtypes": (FP32, BF16)},
    # checkpoints
    "checkpoints_every_64": {"batch": 2, "tokens": 200, "every": 64, "dtypes": (FP32, BF16)},
    "checkpoints_every_50": {"batch": 1, "tokens": 130, "every": 50},
    "checkpoints_packed": {"lengths": (130, 3, 0, 64), "every": 64, "moved": True},
    "checkpoints_positions": {"batch": 2, "tokens": 130,
                              "positions": ((0, 1, 64, 130), (65, -1, 129, 3))},
    "checkpoints_padded": {"batch": 3, "tokens": 66, "every": 32, "padded": (1,), "new": (2,)},
    "checkpoints_slot0_kv": {"lengths": (70, 65), "positions": ((64, 70), (0, -1)), "pad_slot": 0,
                             "state_layout": "kv", "gap": 16, "unkept": (0,)},
})  # fmt: skip

# --------------------------------------------------------------------------------------- decode

DECODE = {"batch": 4, "tokens": 1, "normalize": True}
FEW = {"batch": 2, "Hk": 1, "Hv": 2}  # a few programs: Triton's interpreter is slow

_each("decode", DECODE, {
    "one": {"batch": 1, "dtypes": ALL},
    "batch": {"dtypes": ALL},
    "batch_of_33": {"batch": 33},
    "two_tokens": {"tokens": 2, "dtypes": ALL},
    "eight_tokens": {"tokens": 8, "dtypes": ALL},
    "N0": {"batch": 0},
    "linear": {"rule": "linear"},
    "gated": {"rule": "gated"},
    "delta": {"rule": "delta"},
    "per_key": {"per_key": True, "dtypes": ALL},
    "per_key_raw": {"per_key": True, "raw": True, "tokens": 3},
    "raw": {"raw": True, "dtypes": ALL},
    "neg_eigval": {"raw": True, "neg_eigval": True, "tokens": 4},
    "scale_unit_keys": {"normalize": False, "scale": 1.0},
    "identical_keys": {"keys": "identical", "beta_one": True, "tokens": 8},
    "mixed_gates": {"gates": "mixed", "raw": True, "tokens": 4, "Hv": 6, "dtypes": ALL},
    "r1": {"Hk": 3, "Hv": 3},
    "r3": {"Hk": 16, "Hv": 48, "dtypes": (FP32, BF16)},
    "r4": {"Hk": 1, "Hv": 4},
    "r8": {"Hk": 2, "Hv": 16},
    "grouped_queries": {"Hq": 8, "Hk": 2, "Hv": 2, "tokens": 2},
    "K64_V64": {"K": 64, "V": 64},
    "K128_V128": {"K": 128, "V": 128, "dtypes": ALL},
    "K256_V256": {"K": 256, "V": 256, "batch": 2},
    "K48_V80": {"K": 48, "V": 80, "dtypes": ALL},
    "K33_V17": {"K": 33, "V": 17, "tokens": 3},
    "packed": {"lengths": (1, 3, 0, 8), "flat": True, "tail": 2},
    "state_none": {"state": "none", "tokens": 3},
    "state_rows": {"state": "rows", "tokens": 2},
    "state_kv": {"state_layout": "kv", "K": 48, "V": 80, "dtypes": ALL},
    "state_bf16": {"state_dtype": BF16, "dtypes": ALL},
    "state_fp16": {"state_dtype": FP16, "dtypes": ALL},
    "moved": {"moved": True, "tokens": 2},
    "moved_unkept": {"moved": True, "unkept": (2,)},
    "new_rows": {"new": (1, 3), "dtypes": (FP32, BF16)},
    "padded_rows": {"batch": 6, "padded": (0, 2, 5), "dtypes": ALL},
    "padded_rows_slot0": {"batch": 6, "padded": (1, 4, 5), "pad_slot": 0},
    "all_padded": {"padded": (0, 1, 2, 3)},
    "padded_stride": {"gap": 40, "tokens": 2},
    "bhtd": {"layout": "bhtd", "tokens": 3},
    "strided": {"strided": True, "dtypes": ALL},
    "each": {**FEW, "each": True, "tokens": 4, "dtypes": ALL},
    "each_one_token": {**FEW, "each": True, "dtypes": (FP32, BF16)},
    "each_of_eight": {**FEW, "each": True, "tokens": 8, "K": 128, "moved": True},
    "each_bf16": {**FEW, "each": True, "tokens": 3, "state_dtype": BF16, "raw": True,
                  "dtypes": (FP32, BF16)},
    "each_kv": {**FEW, "each": True, "tokens": 5, "state_layout": "kv", "K": 48, "V": 80, "gap": 8},
    "each_per_key": {**FEW, "each": True, "tokens": 3, "per_key": True, "raw": True,
                     "unkept": (0,)},
    "each_kv_per_key": {**FEW, "each": True, "tokens": 2, "per_key": True, "state_layout": "kv"},
    "each_linear": {**FEW, "each": True, "tokens": 3, "rule": "linear"},
    "each_odd_widths": {"batch": 1, "each": True, "tokens": 6, "K": 33, "V": 17, "Hq": 2, "Hk": 1,
                        "Hv": 1},
    "each_packed": {**FEW, "each": True, "lengths": (1, 3, 0, 8), "flat": True, "tail": 2,
                    "index_dtype": torch.int64},
    "each_packed_bf16": {**FEW, "each": True, "lengths": (1, 4, 2), "state_dtype": BF16, "K": 128,
                         "V": 128, "dtypes": (BF16,)},
    "each_padded": {**FEW, "each": True, "batch": 6, "tokens": 4, "padded": (0, 5), "new": (1, 3),
                    "unkept": (2, 3), "pad_slot": 0},
    "each_rows": {**FEW, "each": True, "state": "rows", "tokens": 2},
    "everything_at_once": {"batch": 6, "tokens": 4, "strided": True, "raw": True, "moved": True,
                           "padded": (1,), "unkept": (4,), "new": (3,), "gap": 8, "Hv": 6,
                           "gates": "mixed", "state_layout": "kv", "index_dtype": torch.int64,
                           "state_dtype": BF16, "dtypes": ALL},
})  # fmt: skip

VERIFY = {"batch": 5, "tokens": 4, "accepted": (4, 0, 2, 1, 3), "normalize": True}
HALF = {**FEW, "accepted": (3, 1)}

_each("verify", VERIFY, {
    "uneven": {"dtypes": ALL},
    "all": {"accepted": (4, 4, 4, 4, 4)},
    "none": {"accepted": (0, 0, 0, 0, 0)},
    "one_token": {"tokens": 1, "accepted": (1, 0, 1, 0, 1)},
    "eight_tokens": {"tokens": 8, "accepted": (8, 0, 5, 1, 7), "raw": True, "dtypes": (FP32, BF16)},
    "conv": {"with_conv": True, "dtypes": ALL},
    "conv_wide_window": {"with_conv": True, "columns": 6, "conv_order": "ld", "gap": 12},
    "per_key": {"per_key": True, "raw": True},
    "delta": {"rule": "delta"},
    "linear": {"rule": "linear"},
    "r3": {"Hk": 3, "Hv": 9, "with_conv": True},
    "grouped_queries": {"Hq": 8, "Hk": 2, "Hv": 2},
    "moved": {"moved": True, "with_conv": True},
    "unkept": {"moved": True, "unkept": (2,), "with_conv": True},
    "new_rows": {"new": (1, 2), "with_conv": True},
    "padded_rows": {"padded": (0, 3), "with_conv": True, "dtypes": (FP32, BF16)},
    "padded_rows_slot0": {"padded": (1, 2), "pad_slot": 0, "with_conv": True},
    "state_bf16_kv": {"state_dtype": BF16, "state_layout": "kv", "dtypes": (FP32, BF16)},
    "state_rows": {"state": "rows"},
    "strided": {"strided": True, "raw": True, "with_conv": True},
    "packed": {**HALF, "lengths": (1, 3, 0), "accepted": (1, 2, 0), "flat": True, "tail": 2,
               "with_conv": True},
    "buffered": {**HALF, "buffered": True, "with_conv": True, "dtypes": ALL},
    "buffered_one_token": {**HALF, "buffered": True, "tokens": 1, "accepted": (1, 0)},
    "buffered_per_key": {**HALF, "buffered": True, "per_key": True, "raw": True, "with_conv": True},
    "buffered_linear": {**HALF, "buffered": True, "rule": "linear"},
    "buffered_moved": {**HALF, "batch": 4, "accepted": (1, 2, 3, 0), "tokens": 3, "buffered": True,
                       "moved": True, "unkept": (2,), "new": (1,), "with_conv": True,
                       "state_layout": "kv", "gap": 8, "conv_order": "ld", "columns": 5,
                       "state_dtype": BF16, "dtypes": (FP32, BF16)},
    "buffered_padded": {**HALF, "batch": 3, "accepted": (1, 2, 3), "buffered": True,
                        "padded": (1,), "pad_slot": 0, "with_conv": True,
                        "index_dtype": torch.int64},
    "buffered_packed": {**HALF, "buffered": True, "lengths": (1, 3, 0), "accepted": (1, 2, 0),
                        "flat": True, "tail": 2, "with_conv": True},
    "buffered_strided": {**HALF, "buffered": True, "strided": True, "raw": True, "with_conv": True,
                         "Hv": 3, "K": 24, "V": 20, "layout": "bhtd"},
})  # fmt: skip

# -------------------------------------------------------------------------- convolution and norm

CONV = {"batch": 2, "tokens": 9, "D": 40}

_each("causal_conv1d", CONV, {
    "plain": {"dtypes": ALL},
    "W2": {"W": 2},
    "W3": {"W": 3, "dtypes": ALL},
    "no_bias": {"bias": False},
    "no_activation": {"activation": None, "dtypes": ALL},
    "no_bias_no_activation": {"bias": False, "activation": None, "W": 2},
    "one_token": {"tokens": 1, "batch": 5, "dtypes": ALL},
    "one_token_moved": {"tokens": 1, "batch": 5, "moved": True, "unkept": (0,), "new": (1,),
                        "padded": (3,), "dtypes": ALL},
    "one_token_wide": {"tokens": 1, "batch": 3, "D": 300, "W": 3, "columns": 5, "conv_order": "ld",
                       "strided": True},
    "one_token_freeze": {"tokens": 1, "freeze": True, "layout": "bdt", "W": 2, "bias": False},
    "one_token_checkpoint": {"tokens": 1, "every": 1, "columns": 4},
    "two_tokens": {"tokens": 2},
    "T0": {"tokens": 0},
    "N0": {"batch": 0, "state": "rows"},
    "long": {"tokens": 131, "batch": 1},
    "odd_channels": {"D": 37, "W": 3},
    "state_none": {"state": "none"},
    "state_rows": {"state": "rows"},
    "columns4": {"columns": 4, "dtypes": ALL},
    "columns7_short": {"columns": 7, "tokens": 2, "W": 3},
    "window_inner_channels": {"conv_order": "ld", "dtypes": ALL},
    "window_inner_channels_columns5": {"conv_order": "ld", "columns": 5, "gap": 8},
    "padded_stride": {"gap": 16},
    "moved": {"moved": True},
    "unkept": {"moved": True, "unkept": (0,)},
    "new_rows": {"new": (1,), "tokens": 2},
    "padded_rows": {"batch": 5, "padded": (0, 3), "dtypes": ALL},
    "padded_rows_slot0": {"batch": 4, "padded": (1, 2), "pad_slot": 0},
    "freeze": {"freeze": True},
    "bdt": {"layout": "bdt", "dtypes": ALL},
    "strided": {"strided": True},
    "packed": {"lengths": (5, 1, 70), "dtypes": ALL},
    "packed_flat": {"lengths": (5, 2, 7), "flat": True, "index_dtype": torch.int64},
    "packed_bdt": {"lengths": (5, 2, 7), "layout": "bdt"},
    "packed_empty": {"lengths": (0, 5, 0, 2, 0), "moved": True, "new": (2,)},
    "packed_tail": {"lengths": (5, 2), "tail": 3, "padded": (0,), "host_lengths": True},
    "packed_none": {"lengths": (), "state": "rows"},
    "starts": {"starts": (0, 8), "columns": 11, "dtypes": ALL},
    "starts_channels": {"starts": (2, 0, 3), "batch": 3, "tokens": 4, "columns": 6, "gap": 8,
                        "conv_order": "ld", "D": 140, "dtypes": (FP32, BF16)},
    "starts_one_token": {"starts": (1, 0, 2), "batch": 3, "tokens": 1, "columns": 5},
    "starts_exact": {"starts": (0, 0), "tokens": 1, "columns": 3},
    "starts_W2": {"starts": (5, 0), "W": 2, "tokens": 6, "columns": 6, "index_dtype": torch.int64},
    "starts_long": {"starts": (7, 30), "tokens": 40, "columns": 43, "W": 3},
    "starts_rows": {"starts": (9, 1, 0, 2, 1), "batch": 5, "tokens": 3, "columns": 5,
                    "moved": True, "unkept": (2,), "new": (1, 3), "padded": (0,), "pad_slot": 0},
    "starts_freeze": {"starts": (1, 2), "tokens": 4, "columns": 5, "freeze": True},
    "starts_packed": {"starts": (2, 1, 0, 1), "lengths": (3, 0, 1, 4), "tail": 2, "columns": 6,
                      "moved": True, "flat": True},
    "starts_bdt": {"starts": (1, 0), "tokens": 3, "columns": 5, "layout": "bdt"},
    "checkpoints_every_4": {"batch": 2, "tokens": 11, "every": 4, "columns": 5},
    "checkpoints_positions": {"lengths": (9, 2, 0), "moved": True,
                              "positions": ((0, 1, 9), (2, -1, 1), (0, -1, -1))},
})  # fmt: skip

QKV = {"batch": 2, "tokens": 5, "normalize": True}

_each("conv_qkv", QKV, {
    "plain": {"dtypes": ALL},
    "one_token": {"batch": 5, "tokens": 1, "dtypes": ALL},
    "no_gates": {"rule": "linear"},
    "only_a": {"rule": "gated"},
    "neg_eigval": {"neg_eigval": True},
    "mixed_gates": {"gates": "mixed", "Hv": 6, "dtypes": ALL},
    "no_normalize": {"normalize": False, "bias": False},
    "no_activation": {"activation": None, "W": 3},
    "r3": {"Hk": 3, "Hv": 9, "K": 48, "V": 80, "W": 2},
    "K128_V128": {"K": 128, "V": 128, "dtypes": (FP32, BF16)},
    "state_none": {"state": "none"},
    "state_rows": {"state": "rows"},
    "window_inner_channels": {"conv_order": "ld", "columns": 4, "gap": 8},
    "moved_new": {"moved": True, "new": (0,)},
    "padded_rows": {"batch": 5, "padded": (1, 4), "dtypes": ALL},
    "padded_rows_slot0": {"batch": 5, "padded": (0, 4), "pad_slot": 0},
    "freeze": {"freeze": True},
    "strided": {"strided": True, "dtypes": (FP32, BF16)},
    "packed": {"lengths": (5, 0, 7), "tail": 2, "flat": True, "dtypes": ALL},
    "checkpoints": {"tokens": 9, "every": 3},
    "starts": {"starts": (3, 1), "columns": 7, "dtypes": ALL},
    "starts_rows": {"starts": (1, 0, 2, 9), "batch": 4, "tokens": 4, "columns": 6, "padded": (3,),
                    "pad_slot": 0, "new": (1,), "conv_order": "ld", "gap": 8, "strided": True,
                    "dtypes": (FP32, BF16)},
    "starts_packed": {"starts": (2, 1, 0), "lengths": (3, 0, 4), "tail": 2, "columns": 6,
                      "flat": True, "Hk": 1, "Hv": 1},
    "starts_freeze": {"starts": (1, 2), "columns": 6, "freeze": True},
})  # fmt: skip

_each("rms_norm_gated", {"batch": 2, "tokens": 3, "state": "none"}, {
    "silu": {"dtypes": ALL},
    "sigmoid": {"gate_activation": "sigmoid", "dtypes": ALL},
    "strided": {"strided": True, "dtypes": ALL},
    "V128": {"V": 128, "dtypes": ALL},
    "V80": {"V": 80, "Hv": 3},
    "empty": {"tokens": 0},
})  # fmt: skip

# ------------------------------------------------------------------------------- a layer's decode

STEP = {"batch": 4, "tokens": 1, "normalize": True}

_each("step", STEP, {
    "split": {"dtypes": ALL},
    "interleaved": {"order": "interleaved", "dtypes": ALL},
    "pairs": {"pairs": True, "dtypes": ALL},
    "split_flat": {"flat": True},
    "interleaved_flat": {"order": "interleaved", "flat": True},
    "pairs_flat": {"pairs": True, "flat": True},
    "split_four_tokens": {"tokens": 4, "dtypes": (FP32, BF16)},
    "interleaved_eight_tokens": {"order": "interleaved", "tokens": 8},
    "r1": {"Hk": 3, "Hv": 3},
    "r3": {"Hk": 2, "Hv": 6, "dtypes": (FP32, BF16)},
    "r3_interleaved": {"Hk": 2, "Hv": 6, "order": "interleaved", "dtypes": (FP32, BF16)},
    "r8": {"Hk": 1, "Hv": 8, "order": "interleaved"},
    "K128_V128": {"K": 128, "V": 128, "dtypes": ALL},
    "K48_V80": {"K": 48, "V": 80, "order": "interleaved"},
    "sigmoid_gate": {"gate_activation": "sigmoid"},
    "no_bias_W3": {"bias": False, "W": 3},
    "no_conv_activation": {"activation": None},
    "no_normalize_scale": {"normalize": False, "scale": 0.5, "tokens": 2},
    "neg_eigval": {"neg_eigval": True, "tokens": 2},
    "mixed_gates": {"gates": "mixed", "Hv": 6, "tokens": 3},
    "state_kv": {"state_layout": "kv", "K": 48, "V": 80},
    "state_bf16": {"state_dtype": BF16, "dtypes": (FP32, BF16)},
    "state_rows": {"state": "rows"},
    "columns4": {"columns": 4, "conv_order": "ld", "gap": 8},
    "moved": {"moved": True, "unkept": (1,)},
    "new_rows": {"new": (0, 2)},
    "padded_rows": {"batch": 6, "padded": (0, 4), "dtypes": ALL},
    "padded_rows_slot0": {"batch": 6, "padded": (1, 5), "pad_slot": 0, "order": "interleaved"},
    "strided": {"strided": True, "flat": True, "dtypes": (FP32, BF16)},
    "N0": {"batch": 0},
})  # fmt: skip
