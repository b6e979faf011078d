"""Configurations are chosen by rule, from sizes alone, on any machine."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from sluice.backends.triton import configs

STATES = (1, 8, 32, 33, 64, 65, 256, 257, 512, 513, 2048, 2049, 8192, 2**20)
TABLES = (*configs.DECODE.values(), *configs.DRAFT.values(), configs.CONV, configs.CONV_QKV)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("table", TABLES)
def test_a_table_ends_with_a_row_for_any_size_and_its_limits_grow(table):
    limits = [row.limit for row in table]
    assert limits == sorted(set(limits))
    assert limits[-1] == configs.ANY


@pytest.mark.parametrize("layout", ["vk", "kv"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("K", [16, 64, 96, 128, 256])
def test_no_row_of_decode_changes_the_order_of_a_sum(layout, dtype, K):
    """PIECE_K and num_warps decide it; tokens and states choose only the rows per program."""
    found = {
        (config.PIECE_K, config.num_warps)
        for states in STATES
        for tokens in (1, 2, 8)
        for config in [configs.decode(dtype, layout, K, 128, states, tokens)]
    }
    assert len(found) == 1
    ((PIECE_K, warps),) = found
    assert max(K, 16) >= PIECE_K or configs.power_of_two(K) == PIECE_K
    assert 32 * warps > PIECE_K or PIECE_K % 32 == 0


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_cache_hints_are_those_a_gpu_knows(dtype, tokens):
    """Any other string would fail, but only when the kernel is compiled."""
    hints = {"", configs.STREAM, configs.KEEP}
    found = [configs.decode(dtype, "vk", 128, 128, states, tokens) for states in STATES]
    assert {hint for config in found for hint in (config.LOAD, config.STORE)} <= hints


@pytest.mark.parametrize("V", [8, 64, 80, 128, 256])
def test_a_program_has_no_more_rows_than_the_state(V):
    for states in STATES:
        rows = configs.decode(torch.float32, "vk", 128, V, states).BLOCK_V
        assert rows <= configs.power_of_two(V)
        assert rows & (rows - 1) == 0


def test_a_program_of_a_large_batch_moves_eight_kilobytes():
    """With fewer, the GPU could not start programs as fast as memory delivers."""
    for dtype in DTYPES:
        config = configs.decode(dtype, "vk", 128, 128, 8192)
        assert 2 * config.BLOCK_V * 128 * dtype.itemsize >= 8192


@pytest.mark.parametrize(
    ("tokens", "expected"), [(1, (1, 1)), (2, (4, 4)), (4, (4, 4)), (5, (4, 16)), (16384, (4, 16))]
)
def test_conv_qkv_has_shorter_blocks_for_short_sequences(tokens, expected):
    config = configs.conv_qkv(128, 128, tokens)
    assert expected == (config.BLOCK_T, config.UNIT_T)
    assert config.num_warps == 1


def test_a_large_state_gets_more_warps_and_as_many_registers_as_there_are():
    small, large = (configs.step(torch.float32, "vk", size, size) for size in (128, 256))
    assert large.num_warps > small.num_warps
    assert large.maxnreg * 32 * large.num_warps <= 65536
