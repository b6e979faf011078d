"""Shared by the tests of transformers models."""

from __future__ import annotations

import copy

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _float32_is_float32():
    """By default cuDNN's convolutions round float32 to 10 bits; stock must be exact here."""
    with pytest.MonkeyPatch.context() as patch:
        if torch.cuda.is_available():
            patch.setattr(torch.backends.cudnn, "allow_tf32", False)
            patch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
        yield


@pytest.fixture(params=[("qwen3_next", 2), ("qwen3_5", 3), ("qwen3_5_moe", 1)], ids=str)
def models(request):
    """A stock model, and an accelerated copy of it."""
    pytest.importorskip("transformers")
    from tests.models import stock_model
    from tests.suite import DEVICE

    from sluice.integrations.transformers import accelerate, plain_torch

    family, r = request.param
    pytest.importorskip(f"transformers.models.{family}", reason="not in this transformers")
    stock = stock_model(family, r=r, device=DEVICE)
    stock.generation_config.eos_token_id = None  # generate all requested tokens
    with plain_torch(stock):
        yield stock, accelerate(copy.deepcopy(stock))
