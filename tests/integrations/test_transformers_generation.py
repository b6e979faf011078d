"""``accelerate`` under ``generate()``: greedy, ragged, beams, static caches, compiled, multimodal.

The tests run with the installed transformers, and skip what that release does not have.
"""

from __future__ import annotations

import copy
import importlib
import inspect

import pytest
import torch

pytest.importorskip("transformers")

from tests.models import (
    close,
    compiled,
    config,
    new_cache,
    ragged,
    randomise,
    states_of,
    static,
    stock_model,
    tokens,
)
from tests.suite import DEVICE

from sluice.integrations.transformers import accelerate, known_layers, plain_torch
from sluice.testing.compare import assert_same_bits, relative_error


@pytest.fixture(autouse=True)
def _inference():
    with torch.no_grad():
        yield


@pytest.fixture
def dense():
    """The same for Qwen3.5 only, where one family is enough."""
    pytest.importorskip("transformers.models.qwen3_5", reason="not in this transformers")
    stock = stock_model("qwen3_5", r=2, device=DEVICE)
    stock.generation_config.eos_token_id = None
    with plain_torch(stock):
        yield stock, accelerate(copy.deepcopy(stock))


def greedy(model, ids, n=12, **options):
    return model.generate(ids, max_new_tokens=n, do_sample=False, **options)


def test_sixty_four_greedy_tokens(models):
    stock, ours = models
    ids = tokens(2, 20)
    exact = greedy(stock, ids, 64)
    assert exact.shape == (2, 84)
    assert torch.equal(greedy(ours, ids, 64), exact)
    assert torch.equal(greedy(ours, ids, 64), exact)  # nothing is left over from the first run


def test_ragged_left_padded_prompts(models):
    stock, ours = models
    lengths = (20, 13, 3, 1)
    ids, mask = ragged(lengths, "left")
    found = greedy(ours, ids, attention_mask=mask)
    assert torch.equal(found, greedy(stock, ids, attention_mask=mask))
    for i, n in enumerate(lengths):
        alone = greedy(stock, ids[i : i + 1, 20 - n :])
        assert torch.equal(found[i, 20:], alone[0, n:]), f"row {i}"


def test_ragged_right_padded_prompts_row_27(models):
    """Right padding: the logits at each prompt's end and its next tokens are those of it alone.

    Stock's prompt logits are right, but its cache is not; the accelerated model's cache is.
    """
    stock, ours = models
    lengths = (9, 14, 2)
    ids, mask = ragged(lengths, "right")
    seen = {}
    for name, model in (("stock", stock), ("ours", ours)):
        cache = new_cache(stock)
        first = model(ids, attention_mask=mask, past_key_values=cache).logits
        close(first[1], stock(ids[1:2, :14]).logits[0], "the row without padding")
        for i, n in enumerate(lengths):
            close(first[i, :n], stock(ids[i : i + 1, :n]).logits[0], f"{name}, prompt {i}")
        seen[name] = cache
    for i, n in enumerate(lengths):
        alone = new_cache(stock)
        stock(ids[i : i + 1, :n], past_key_values=alone)
        exact, found = states_of(alone), states_of(seen["ours"])
        close(found[1][i], exact[1][0], "recurrent state")
        close(found[0][i], exact[0][0], "conv state")
        if n < 14:
            assert relative_error(states_of(seen["stock"])[1][i], exact[1][0]) > 0.01


def test_beam_search(models):
    stock, ours = models
    ids, mask = ragged((12, 7), "left")
    options = {"attention_mask": mask, "num_beams": 3}
    assert torch.equal(greedy(ours, ids, **options), greedy(stock, ids, **options))


def test_a_reordered_cache_continues_as_its_rows_do(models):
    stock, ours = models
    ids, last = tokens(3, 15), tokens(3, 1, seed=1)
    cache = new_cache(stock)
    ours(ids, past_key_values=cache)
    order = torch.tensor([2, 0, 2], device=DEVICE)
    cache.reorder_cache(order)
    found = ours(last, past_key_values=cache).logits
    exact = stock(torch.cat([ids[order], last], dim=1), use_cache=False).logits[:, -1:]
    close(found, exact)
    more = tokens(3, 11, seed=2)
    exact = stock(torch.cat([ids[order], last, more], dim=1), use_cache=False).logits[:, -11:]
    close(ours(more, past_key_values=cache).logits, exact, "many tokens behind it")


def test_a_static_cache(models):
    stock, ours = models
    static(stock)
    ids, mask = ragged((12, 7), "left")
    options = {"attention_mask": mask, "cache_implementation": "static", "disable_compile": True}
    try:
        exact = greedy(stock, ids, **options)
    except KeyError as reason:
        pytest.skip(f"stock fails with a static cache in this transformers: {reason}")
    assert torch.equal(exact, greedy(stock, ids, attention_mask=mask))
    assert torch.equal(greedy(ours, ids, **options), exact)


def test_a_reset_static_cache_starts_anew(models):
    stock, ours = models
    cache = static(stock)
    first = ours(tokens(1, 9), past_key_values=cache).logits
    cache.reset()
    close(ours(tokens(1, 9), past_key_values=cache).logits, first)


@pytest.mark.parametrize("steps", [(1, 1, 1)], ids=["one token"])
def test_compiled_decode_with_a_static_cache_equals_stock(dense, steps):
    stock, ours = dense
    cache, ids = static(stock), tokens(1, 9)
    ours(ids, past_key_values=cache)
    forward = compiled(ours, stock)
    for t, n in enumerate(steps):
        at = torch.arange(ids.shape[1], ids.shape[1] + n, device=DEVICE).unsqueeze(0)
        new = tokens(1, n, seed=t + 1)
        ids = torch.cat([ids, new], dim=1)
        found = forward(new, position_ids=at, past_key_values=cache).logits
        close(found, stock(ids, use_cache=False).logits[:, -n:])


def multimodal(family, name):
    package = pytest.importorskip(
        f"transformers.models.{family}", reason="not in this transformers"
    )
    parts = {
        "text_config": config(family, layers=4).to_dict(),
        "vision_config": {
            "depth": 1,
            "hidden_size": 16,
            "num_heads": 2,
            "intermediate_size": 16,
            "out_hidden_size": 48,
            "patch_size": 4,
            "num_position_embeddings": 16,
        },
        "image_token_id": 91,
        "video_token_id": 92,
        "vision_start_token_id": 93,
        "vision_end_token_id": 94,
    }
    torch.manual_seed(0)
    file = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    model = getattr(file, f"{name}ForConditionalGeneration")(
        getattr(package, f"{name}Config")(**parts)
    )
    for layer in known_layers(model):
        randomise(layer)
    model.lm_head.weight.data.mul_(8)
    model.generation_config.eos_token_id = None
    return model.to(DEVICE).eval()


@pytest.mark.parametrize(
    ("family", "name"), [("qwen3_5", "Qwen3_5"), ("qwen3_5_moe", "Qwen3_5Moe")]
)
def test_the_text_part_of_a_multimodal_model_with_an_image(family, name):
    stock = multimodal(family, name)
    ours = accelerate(copy.deepcopy(stock))
    assert len(known_layers(ours)) == 3
    ids = tokens(1, 14)
    ids[0, 3:6] = torch.tensor([93, 91, 94], device=DEVICE)  # one image of one merged patch
    generator = torch.Generator().manual_seed(1)
    given = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": torch.randn(4, 3 * 2 * 4 * 4, generator=generator).to(DEVICE),
        "image_grid_thw": torch.tensor([[1, 2, 2]], device=DEVICE),
        "mm_token_type_ids": (ids == 91).int(),
    }
    if "mm_token_type_ids" not in inspect.signature(stock.model.forward).parameters:
        del given["mm_token_type_ids"]
    with plain_torch(stock):
        exact = stock(**given).logits
        close(ours(**given).logits, exact)
        assert (
            relative_error(stock(ids, attention_mask=given["attention_mask"]).logits, exact) > 0.01
        )
        found, tokens_exact = (
            m.generate(**given, max_new_tokens=10, do_sample=False) for m in (ours, stock)
        )
        assert torch.equal(found, tokens_exact)


def test_generation_of_a_row_does_not_depend_on_its_batch(dense):
    _, ours = dense
    ids = tokens(3, 10)
    together = greedy(ours, ids, 8)
    for i in range(3):
        assert_same_bits(together[i : i + 1], greedy(ours, ids[i : i + 1], 8), f"row {i}")
