"""``examples/serve.py`` gives the tokens that one-by-one generation gives."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

import sluice

FILE = Path(__file__).parents[1] / "examples" / "serve.py"
NEW = 12


@pytest.fixture(scope="module")
def serve():
    spec = importlib.util.spec_from_file_location("serve_example", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def model(serve):
    return serve.random_model("cpu")


@pytest.fixture(scope="module")
def prompts(serve, model):
    found = serve.make_prompts(model.lm_head.weight.shape[0], 6, 96)
    # one that repeats itself, so that guesses have a chance; one shorter than the conv window
    return [*found, [5, 6, 7, 8] * 9, [3, 9]]


@pytest.fixture(scope="module")
def exact(serve, model, prompts):
    return serve.one_by_one(model, prompts, NEW)


@pytest.fixture(autouse=True)
def _plain():
    with sluice.use_backend("reference"):
        yield


@pytest.mark.parametrize("speculate", [0, 3])
@pytest.mark.parametrize("slots", [4, 16], ids="{} slots".format)
def test_the_engine_gives_the_tokens_of_one_by_one_generation(
    serve, model, prompts, exact, slots, speculate
):
    assert len({tuple(x) for x in exact}) == len(exact)
    engine = serve.Engine(model, slots, speculate)
    assert serve.serve(engine, prompts, NEW) == exact
    kept = len(engine.prefixes)
    assert engine.pool.slots - engine.pool.available == kept  # nothing else holds a slot
    if slots == 16:
        assert serve.serve(engine, prompts, NEW) == exact  # now from cached prefixes
        assert engine.counts["prompt tokens from the cache"] >= 5 * serve.BLOCK


@pytest.mark.parametrize("wrong", [2, 3, 5])
def test_right_and_wrong_guesses_give_the_same_tokens(
    serve, model, prompts, exact, wrong, monkeypatch
):
    """Guesses that are right, but for every ``wrong``-th token of a sequence."""

    known = list(zip(prompts, exact, strict=True))

    def guess(tokens, n):
        prompt, made = next((p, x) for p, x in known if tokens[: len(p)] == p)
        at = len(tokens) - len(prompt)
        found = [(i + at, token) for i, token in enumerate(made[at : at + n])]
        return [token if i % wrong else (token + 1) % 512 for i, token in found]

    monkeypatch.setattr(serve, "guess", guess)
    engine = serve.Engine(model, 16, speculate=3)
    assert serve.serve(engine, prompts, NEW) == exact
    assert 0 < engine.counts["right guesses"] < engine.counts["guesses"]


def test_a_prefix_that_is_not_restored_is_noticed(serve, model, prompts, exact, monkeypatch):
    """The comparison can fail: a fork that loses the state gives other tokens."""
    engine = serve.Engine(model, 16)
    serve.serve(engine, prompts, 2)
    monkeypatch.setattr(engine.pool, "fork", lambda slot: engine.pool.allocate())
    assert serve.serve(engine, prompts, NEW) != exact


def test_guesses_are_what_followed_before(serve):
    assert serve.guess([1, 2, 3, 4, 1, 2], 2) == [3, 4]
    assert serve.guess([1, 2, 3, 4, 1, 2], 0) == []
    assert serve.guess([1, 2, 3], 4) == []
    assert torch.get_default_dtype() == torch.float32
