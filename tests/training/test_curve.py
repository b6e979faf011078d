"""A training run of a small model has the losses of stock transformers."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("transformers")

from sluice.integrations.transformers import accelerate, plain_torch
from tests.models import stock_model, tokens
from tests.suite import DEVICE

STEPS = 12


def losses(model, steps=STEPS):
    # AdamW divides small gradients by themselves: one rounding in the weights of stock alone moves
    # its loss by more than 1e-4 after a dozen steps
    optimizer = torch.optim.SGD(model.parameters(), lr=0.002, momentum=0.9)
    found = []
    for step in range(steps):
        ids = tokens(2, 70 + step % 3)
        loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def test_losses_are_those_of_stock_at_every_step():
    stock = stock_model("qwen3_5", r=2, device=DEVICE).train()
    ours = accelerate(copy.deepcopy(stock))
    with plain_torch(stock):
        exact = losses(stock)
    found = losses(ours)
    assert exact[-1] < exact[0]
    assert max(abs(a - b) for a, b in zip(found, exact, strict=True)) <= 1e-4
