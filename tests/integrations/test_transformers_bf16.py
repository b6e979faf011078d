"""``accelerate`` in bfloat16: as close to the float32 model as stock bfloat16 is, on any path.

On a GPU the tests also run a model with Qwen3.5-35B-A3B's layer shapes, and require GPU kernels.
"""

from __future__ import annotations

import gc
from typing import NamedTuple

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from tests.models import (
    LAYERS_35B,
    compiled,
    exact_of,
    natural,
    new_cache,
    packing,
    ragged,
    states_of,
    static,
    stock_model,
    tokens,
    twin_of,
)
from tests.rounding import as_good, errors, forced, near_best
from tests.suite import DEVICE

from sluice import calls, dispatch
from sluice.integrations.transformers import accelerate, known_layers, plain_torch
from sluice.testing.compare import assert_same_bits

SMALL = {"HK": 4, "K": 64, "V": 64, "hidden_size": 64, "vocab_size": 256}
EXPERTS = {"num_experts": 16, "num_experts_per_tok": 8}
KINDS = {
    "qwen3_next": ("qwen3_next", {**SMALL, **EXPERTS, "r": 2}),
    "qwen3_5": ("qwen3_5", {**SMALL, "r": 3}),
    "qwen3_5_moe": ("qwen3_5_moe", {**SMALL, **EXPERTS, "r": 1}),
}
if DEVICE == "cuda":
    KINDS["35B-A3B"] = ("qwen3_5_moe", LAYERS_35B)
FASTEST = {"cuda": {"hopper", "triton"}, "cpu": {"cpu"}}[DEVICE]


class Models(NamedTuple):
    """The same weights three times: in float32, in stock bfloat16, and accelerated."""

    exact: nn.Module
    stock: nn.Module
    ours: nn.Module


@pytest.fixture(scope="module", autouse=True)
def memory_given_back():
    """Free large models before other tests."""
    yield
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()


@pytest.fixture(scope="module", params=list(KINDS))
def models(request):
    family, sizes = KINDS[request.param]
    pytest.importorskip(f"transformers.models.{family}", reason="not in this transformers")
    stock = stock_model(family, device=DEVICE, dtype=torch.bfloat16, **sizes)
    natural(stock).requires_grad_(False)
    stock.generation_config.eos_token_id = None  # generate all requested tokens
    with plain_torch(stock):
        yield Models(exact_of(stock), stock, accelerate(twin_of(stock)))


@pytest.fixture(autouse=True)
def served(monkeypatch):
    """(operator, backend) of each call; every backend must have kernels for the device."""
    seen, choose = set(), dispatch.choose

    def listed(spec, *options):
        assert spec.device.type == DEVICE
        assert spec.dtype == torch.bfloat16
        choice = choose(spec, *options)
        seen.add((spec.op, choice.explanation.chosen))
        return choice

    monkeypatch.setattr(dispatch, "choose", listed)
    calls.forget()
    with torch.no_grad():
        yield seen
    if DEVICE == "cuda" or dispatch.unavailable("cpu") is None:
        assert {backend for _, backend in seen} <= FASTEST, seen


def unpadded(ids, mask):
    """Each row's tokens."""
    return [row[keep] for row, keep in zip(ids, mask.bool(), strict=True)]


def alone(model, rows, last=0):
    """The logits of all rows, or of their last tokens, concatenated [tokens, vocabulary]."""
    return torch.cat([model(x.unsqueeze(0), use_cache=False).logits[0, -last:] for x in rows])


def generate(model, ids, n=64, **options):
    """The new tokens."""
    return model.generate(ids, max_new_tokens=n, do_sample=False, **options)[:, ids.shape[1] :]


def as_chosen(models, prompts, new, name):
    """Each new token is the exact model's best, or ties with it."""
    near_best(forced(models.exact, prompts, new), forced(models.stock, prompts, new), new, name)


def test_prefill(models):
    ids = tokens(2, 150)
    exact, stock, ours = (model(ids, use_cache=False).logits for model in models)
    assert ours.dtype == torch.bfloat16
    as_good(ours, stock, exact, "without a cache")
    as_good(models.ours(ids, past_key_values=new_cache(models.ours)).logits, stock, exact, "with")


def test_continuation(models, served):
    """One, a few and many tokens after a cached prefix, against both models without a cache."""
    calls = (70, *[1] * 12, 5, 8, 30, *[1] * 4)
    ids, cache = tokens(4, sum(calls)), new_cache(models.ours)
    exact, stock = (model(ids, use_cache=False).logits for model in models[:2])
    pieces = ids.split(calls, dim=1)
    found = torch.cat([models.ours(x, past_key_values=cache).logits for x in pieces], dim=1)
    few = torch.cat([torch.full((n,), n <= 8) for n in calls]).to(DEVICE)
    for name, where in (("decode", few), ("prefill", ~few)):
        as_good(found[:, where], stock[:, where], exact[:, where], name)
    assert {op for op, _ in served} == {"conv_qkv", "prefill", "rms_norm_gated", "step"}
    hopper = dispatch.unavailable("hopper") is None and torch.cuda.get_device_capability() == (9, 0)
    if hopper and models.stock.config.linear_key_head_dim == 128:
        assert {backend for op, backend in served if op == "prefill"} == {"hopper"}


def test_sixty_four_greedy_tokens(models):
    """Both models pass, so the test asks no more of the accelerated one than of stock."""
    ids = tokens(4, 20)
    chosen = {name: generate(getattr(models, name), ids) for name in ("stock", "ours")}
    for name, new in chosen.items():
        assert new.shape == (4, 64)
        as_chosen(models, list(ids), new, name)
    same = (chosen["ours"] == chosen["stock"]).long().cumprod(1).sum(1)
    assert int(same.max()) > 8  # rows that agree until the first tie
    assert_same_bits(generate(models.ours, ids), chosen["ours"], "again")


def test_ragged_left_padded_prompts(models):
    ids, mask = ragged((40, 33, 20, 9, 2, 1), "left")
    rows = unpadded(ids, mask)
    found = models.ours(ids, attention_mask=mask, use_cache=False).logits[mask.bool()]
    as_good(found, alone(models.stock, rows), alone(models.exact, rows), "prompts")
    as_chosen(models, rows, generate(models.ours, ids, 16, attention_mask=mask), "tokens")


def test_ragged_right_padded_prompts_row_27(models):
    """Logits and states are those of each prompt alone; stock's states are not."""
    lengths = [1 + 37 * i % 71 for i in range(25)]  # 1 to 71, unordered
    ids, mask = ragged(lengths, "right")
    mine, theirs = new_cache(models.ours), new_cache(models.stock)
    found = models.ours(ids, attention_mask=mask, past_key_values=mine).logits[mask.bool()]
    models.stock(ids, attention_mask=mask, past_key_values=theirs)
    exact, exact_caches = with_caches(models.exact, unpadded(ids, mask))
    stock, stock_caches = with_caches(models.stock, unpadded(ids, mask))
    as_good(found, stock, exact, "prompts")
    for layer in range(3):
        parts = zip(
            ("conv", "recurrent"),
            vectors([mine], layer),
            vectors(stock_caches, layer),
            vectors(exact_caches, layer),
            vectors([theirs], layer),
            strict=True,
        )
        for name, ours, plain, right, padded in parts:
            as_good(ours, plain, right, f"{name} state of layer {layer}")
            assert errors(padded, right).median() > 10 * errors(plain, right).median()


def with_caches(model, rows):
    """Each row alone: the concatenated logits, and the caches."""
    caches = [new_cache(model) for _ in rows]
    given = zip(rows, caches, strict=True)
    logits = [model(row.unsqueeze(0), past_key_values=cache).logits[0] for row, cache in given]
    return torch.cat(logits), caches


def vectors(caches, layer):
    """The columns of conv windows [B, D, W], and each head's recurrent state [B, HV, K, V]."""
    conv, state = (torch.cat(x) for x in zip(*(states_of(c, layer) for c in caches), strict=True))
    return conv.transpose(1, 2), state.flatten(2)


def test_tokens_behind_right_padding_row_27(models):
    """A batch of prompts padded on the right, then more tokens of each."""
    lengths, n = (40, 33, 70, 9, 2), 24
    ids, mask = ragged(lengths, "right")
    more = tokens(len(lengths), n, seed=1)
    rows = [torch.cat(pair) for pair in zip(unpadded(ids, mask), more, strict=True)]
    cache, found = new_cache(models.ours), []
    models.ours(ids, attention_mask=mask, past_key_values=cache)
    position = torch.tensor(lengths, device=DEVICE).unsqueeze(1)
    for new in more.split((1, 1, 1, 1, 20), dim=1):
        T = new.shape[1]
        mask = torch.cat([mask, torch.ones_like(new)], dim=1)
        at = position + torch.arange(T, device=DEVICE)
        options = {"attention_mask": mask, "position_ids": at, "past_key_values": cache}
        found.append(models.ours(new, **options).logits)
        position += T
    found = torch.cat(found, dim=1).flatten(0, 1)
    as_good(found, alone(models.stock, rows, n), alone(models.exact, rows, n), "tokens")


def test_a_static_cache(models):
    static(models.ours)
    ids, mask = ragged((20, 13, 5), "left")
    options = {"cache_implementation": "static", "disable_compile": True}
    try:
        new = generate(models.ours, ids, attention_mask=mask, **options)
    except KeyError as reason:
        pytest.skip(f"a static cache fails in this transformers: {reason}")
    as_chosen(models, unpadded(ids, mask), new, "tokens")


@pytest.mark.parametrize("models", ["qwen3_5"], indirect=True)
def test_compiled_decode_with_a_static_cache(models):
    cache, ids = static(models.ours), tokens(4, 40)
    models.ours(ids[:, :9], past_key_values=cache)
    forward = compiled(models.ours, models.stock)
    found = []
    for t in range(9, 40):
        at = torch.full((4, 1), t, device=DEVICE)
        found.append(forward(ids[:, t : t + 1], position_ids=at, past_key_values=cache).logits)
    exact, stock = (model(ids, use_cache=False).logits[:, 9:] for model in models[:2])
    as_good(torch.cat(found, dim=1), stock, exact, "decode")


class Followed:
    """A logits processor that changes nothing and records each step's beams and scores."""

    def __init__(self):
        self.steps = []

    def __call__(self, ids, scores):
        self.steps.append((ids.clone(), centred(scores)))
        return scores


def centred(logits):
    """Logits or log probabilities, which differ by a constant."""
    return logits.float() - logits.float().mean(-1, keepdim=True)


def test_beam_search(models):
    """Every third step, each beam's logits are those of its tokens without a cache.

    transformers chooses the beams from these logits. Two runs that decide a tie differently end
    with other beams and scores, so the final scores say little.
    """
    ids, mask = ragged((20, 13, 7, 16, 3, 10), "left")
    followed = Followed()
    options = {"attention_mask": mask, "num_beams": 3, "logits_processor": [followed]}
    assert generate(models.ours, ids, 16, **options).shape == (6, 16)
    assert len(followed.steps) == 16
    mask, parts = mask.repeat_interleave(3, dim=0), []
    for beams, found in followed.steps[::3]:
        live = torch.cat([mask, mask.new_ones(18, beams.shape[1] - mask.shape[1])], dim=1)
        given = {"attention_mask": live, "use_cache": False, "logits_to_keep": 1}
        exact, stock = (centred(model(beams, **given).logits[:, -1]) for model in models[:2])
        parts.append((found, stock, exact))
    as_good(*(torch.stack(part) for part in zip(*parts, strict=True)), "beams")


def test_a_reordered_cache_continues_as_its_rows_do(models):
    ids, more = tokens(4, 15), tokens(4, 41, seed=1)
    cache = new_cache(models.ours)
    models.ours(ids, past_key_values=cache)
    order = torch.tensor([2, 0, 2, 3], device=DEVICE)
    cache.reorder_cache(order)
    found = [models.ours(x, past_key_values=cache).logits for x in more.split((1, 20, 20), 1)]
    whole = torch.cat([ids[order], more], dim=1)
    exact, stock = (model(whole, use_cache=False).logits[:, 15:] for model in models[:2])
    as_good(torch.cat(found, dim=1), stock, exact, "rows")


def test_packed_samples_row_29(models):
    lengths = (60, 31, 1, 90, 4, 47)
    ids = tokens(1, sum(lengths))
    position, borders, numbers = packing(lengths)
    exact, stock = (alone(model, ids[0].split(lengths)) for model in models[:2])
    packed = {"position_ids": position, "cu_seq_lens_q": borders, "use_cache": False}
    found = models.ours(ids, **packed).logits[0]
    as_good(found, stock, exact, "samples")
    late = slice(lengths[0], None)  # samples that earlier ones must not affect
    leaked = models.stock(ids, **packed).logits[0]
    as_good(found[late], stock[late], exact[late], "later samples")
    assert errors(leaked[late], exact[late]).median() > 5 * errors(stock, exact).median()
    by_number = {"position_ids": position, "seq_idx": numbers, "use_cache": False}
    first = [first_layer(models.ours, ids, options) for options in (packed, by_number)]
    assert_same_bits(*first, "seq_idx")


def first_layer(model, ids, options):
    """The output of the first gated delta layer: full attention detects samples in other ways."""
    seen = []
    handle = known_layers(model)[0].register_forward_hook(lambda m, a, y: seen.append(y))
    model(ids, **options)
    handle.remove()
    return seen[0]
