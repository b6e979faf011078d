"""Rows of packed samples, where a layer takes some of them apart."""

from __future__ import annotations

import torch

from sluice.layers.rows import last_inputs


def test_the_window_of_a_short_sample_has_nothing_of_the_one_before_it():
    """Reliability row 29: the second sample has one token, the window four columns."""
    x = torch.arange(1, 10).float().reshape(1, 9, 1)
    windows = last_inputs(x, torch.tensor([0, 5, 6, 9]), 4)
    assert windows[:, 0].tolist() == [[2, 3, 4, 5], [0, 0, 0, 6], [0, 7, 8, 9]]


def test_rows_of_a_batch_are_samples_of_their_own():
    x = torch.arange(1, 7).float().reshape(2, 3, 1)
    windows = last_inputs(x, None, 4)
    assert windows[:, 0].tolist() == [[0, 1, 2, 3], [0, 4, 5, 6]]
