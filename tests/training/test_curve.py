"""A training run of a small model has the losses of stock transformers."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from sluice.integrations.transformers import accelerate, plain_torch
from tests.suite import DEVICE

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS = 300


@pytest.fixture
def example(monkeypatch):
    """``examples/train_small_model.py``: a model with layers of both kinds, and text."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import train_small_model

    yield train_small_model
    sys.modules.pop("train_small_model")


def losses(example, model, dtype=torch.float32, seed=0):
    model = model.to(DEVICE, dtype).train()
    # Larger steps amplify rounding: with 1e-3, stock's own losses differ by 0.07 after 300 steps
    # from those that it has with each weight off by one rounding
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batches = example.batches(tokens=256, seed=seed, packed=False)
    found = []
    for _ in range(STEPS):
        batch = {name: x.to(DEVICE) for name, x in next(batches).items()}
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return torch.tensor(found)


@pytest.mark.slow
def test_losses_are_those_of_stock_at_every_step(example):
    stock = example.small_model(seed=0)
    ours = accelerate(copy.deepcopy(stock))
    with plain_torch(stock):
        exact = losses(example, stock)
    found = losses(example, ours)
    assert exact[-1] < exact[0] / 2
    assert (found - exact).abs().max() <= 1e-4


@pytest.mark.long
def test_bfloat16_is_nearer_to_stock_than_another_seed_of_stock(example):
    stock, other = example.small_model(seed=0), example.small_model(seed=1)
    ours = accelerate(copy.deepcopy(stock))
    with plain_torch(stock), plain_torch(other):
        exact = losses(example, stock, torch.bfloat16)
        spread = losses(example, other, torch.bfloat16) - exact
    apart = losses(example, ours, torch.bfloat16) - exact
    assert exact[-1] < exact[0] / 2
    assert apart.abs().max() <= spread.abs().max()
    assert apart.abs().mean() <= spread.abs().mean()
