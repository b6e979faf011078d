"""Gradients of an accelerated model, against transformers' own and each sequence alone."""

from __future__ import annotations

import copy
import itertools
import warnings

import pytest
import torch

pytest.importorskip("transformers")

from tests.models import close, new_cache, packing, states_of, stock_model, tokens
from tests.suite import DEVICE
from tests.training.calls import states_in_backward

from sluice.contract.errors import ContractError
from sluice.integrations import transformers as integration
from sluice.integrations.transformers import accelerate, known_layers, plain_torch
from sluice.layers.weights import is_known
from sluice.testing.compare import assert_same_bits, assert_within

LENGTHS = (6, 70, 1, 4)


@pytest.fixture(autouse=True)
def _forget_warnings(monkeypatch):
    monkeypatch.setattr(integration, "_warned", set())


@pytest.fixture(params=[("qwen3_next", 2), ("qwen3_5", 3)], ids=str)
def models(request):
    """A stock model, and an accelerated copy of it."""
    family, r = request.param
    pytest.importorskip(f"transformers.models.{family}", reason="not in this transformers")
    stock = stock_model(family, r=r, device=DEVICE)
    with plain_torch(stock):
        yield stock, accelerate(copy.deepcopy(stock))


def packed(lengths=LENGTHS):
    """One row of packed sequences, with the arguments that a collator adds."""
    position, borders, _ = packing(lengths)
    return tokens(1, sum(lengths)), {"position_ids": position, "cu_seq_lens_q": borders}


def needs_positions(model):
    """Qwen3.5 before 5.4 gives its layers rotary positions alone, which stand still in images."""
    seen = []
    parent = next(m for m in model.modules() if any(map(is_known, m.children())))
    note = parent.register_forward_pre_hook(
        lambda m, args, kwargs: seen.append(kwargs["position_ids"]), with_kwargs=True
    )
    with torch.no_grad():
        model(tokens(1, 3), use_cache=False)
    note.remove()
    if seen[0].dim() != 2:
        pytest.skip("this transformers keeps positions from its layers")


def same_gradients(ours, stock):
    compared = 0
    for (name, p), exact in zip(ours.named_parameters(), stock.parameters(), strict=True):
        if exact.grad is not None and exact.grad.any():
            assert_within(p.grad, exact.grad, 1e-3, name=name)
            compared += "linear_attn" in name
    assert compared >= 3 * 7  # three layers, all their weights


def test_training_a_padded_batch_has_the_gradients_of_stock(models):
    stock, ours = models
    ids = tokens(2, 70)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="sluice.accelerate")
        found = ours(ids, attention_mask=mask, labels=ids)
    exact = stock(ids, attention_mask=mask, labels=ids)
    close(found.loss, exact.loss, "loss")
    found.loss.backward()
    exact.loss.backward()
    same_gradients(ours, stock)


def test_gradient_checkpointing_changes_no_gradient(models):
    _, ours = models
    ids = tokens(2, 70)
    again = copy.deepcopy(ours).train()
    ours.train()(ids, labels=ids, use_cache=False).loss.backward()
    again.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    again(ids, labels=ids, use_cache=False).loss.backward()
    for (name, p), other in zip(ours.named_parameters(), again.parameters(), strict=True):
        if p.grad is not None:
            assert_same_bits(other.grad, p.grad, name)


@pytest.mark.parametrize("cached", [False, True])
def test_a_training_step_starts_from_zero_and_uses_no_final_state(models, cached):
    """Transformers makes a cache unless it is told not to; it takes no part in the loss."""
    _, ours = models
    ids = tokens(1, 9)

    def step():
        ours.train()(ids, labels=ids, use_cache=cached).loss.backward()

    assert states_in_backward(step) == [set()] * len(known_layers(ours))


def test_gradients_from_a_cache_with_tokens_are_stock_s(models):
    _, ours = models
    ids = tokens(1, 9)
    cache = new_cache(ours)
    with torch.no_grad():
        ours(ids, past_key_values=cache, use_cache=True)
    with pytest.warns(UserWarning, match="gradients from a cache that holds tokens"):
        ours(ids, past_key_values=cache, use_cache=True)


def test_a_frozen_model_needs_no_gradients(models):
    _, ours = models
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours.requires_grad_(False)(tokens(1, 9))


@pytest.mark.parametrize("given", ["cu_seq_lens_q", "position_ids"])
@pytest.mark.parametrize("checkpoints", [False, True], ids=["", "checkpoints"])
def test_gradients_of_packed_sequences_are_those_of_each_alone_row_29(models, given, checkpoints):
    """Stock's torch functions mix packed sequences, so sluice does not use them here."""
    stock, ours = models
    ids, options = packed()
    borders = options["cu_seq_lens_q"]
    if given == "position_ids":  # as DataCollatorWithFlattening makes them
        needs_positions(ours)
        del options["cu_seq_lens_q"]
    if checkpoints:
        ours.train().gradient_checkpointing_enable()
    weight = torch.randn(1, ids.shape[1], 97, generator=torch.Generator().manual_seed(1))
    weight = weight.to(DEVICE)
    logits = ours(ids, use_cache=False, **options).logits
    (logits * weight).sum().backward()
    for a, b in itertools.pairwise(borders):
        alone = stock(ids[:, a:b], use_cache=False).logits
        close(logits[:, a:b], alone)
        (alone * weight[:, a:b]).sum().backward()
    same_gradients(ours, stock)


def test_a_compiled_training_step_of_packed_sequences_has_the_same_gradients():
    """Of a model without experts: torch 2.13 does not always trace those of transformers."""
    pytest.importorskip("transformers.models.qwen3_5", reason="not in this transformers")
    torch._dynamo.reset()
    ours = accelerate(stock_model("qwen3_5", r=3, device=DEVICE))
    if not integration._takes_borders(type(known_layers(ours)[0])):
        pytest.skip("before 5.9, transformers' models branch on values")
    ids, options = packed((5, 8))
    found = []
    for step in (ours, torch.compile(ours, fullgraph=True, backend="aot_eager")):
        step(ids, labels=ids, use_cache=False, **options).loss.backward()
        found.append({n: p.grad for n, p in ours.named_parameters() if p.grad is not None})
        ours.zero_grad()
    for name, exact in found[0].items():
        assert_within(found[1][name], exact, 1e-5, name=name)


def test_positions_are_read_again_once_they_are_written_to(models):
    """A trainer may keep one buffer of positions for all batches."""
    _, ours = models
    needs_positions(ours)
    ids = tokens(1, 12)
    position = torch.arange(12, device=DEVICE).unsqueeze(0)
    whole = ours(ids, position_ids=position, use_cache=False).logits
    close(whole, ours(ids, use_cache=False).logits)
    position[0, 5:] -= 5
    found = ours(ids, position_ids=position, use_cache=False).logits
    for part in (slice(0, 5), slice(5, 12)):
        close(found[:, part], ours(ids[:, part], use_cache=False).logits)


def test_positions_of_one_row_serve_batches_of_any_size(models):
    """One row of positions stands for every row of a batch."""
    _, ours = models
    needs_positions(ours)
    position = torch.cat([torch.arange(5), torch.arange(7)]).unsqueeze(0).to(DEVICE)
    ids = tokens(2, 12)
    one = ours(ids[:1], position_ids=position, use_cache=False).logits
    both = ours(ids, position_ids=position, use_cache=False).logits
    close(both[:1], one)
    close(both[1:], ours(ids[1:], position_ids=position.clone(), use_cache=False).logits)


def test_a_cache_gets_the_packed_states_too(models):
    _, ours = models
    _, options = packed((5, 8))
    cache, before = new_cache(ours), new_cache(ours)
    with torch.no_grad():
        known_layers(ours)[0](hidden := torch.randn(1, 13, 48, device=DEVICE), before, **options)
    known_layers(ours)[0](hidden, cache, **options).sum().backward()
    for kept, exact in zip(*(states_of(c) for c in (cache, before)), strict=True):
        assert not kept.requires_grad
        close(kept, exact, "state")


def test_what_would_be_wrong_is_refused(models):
    _, ours = models
    layer = known_layers(ours)[0]
    _, options = packed((5, 8))
    hidden, cache = torch.randn(1, 13, 48, device=DEVICE), new_cache(ours)
    layer(hidden, cache, **options)
    with pytest.raises(ContractError, match="cu_seq_lens_q: expected None: gradients from a cache"):
        layer(hidden, cache, **options)
    with pytest.raises(ContractError, match="attention_mask: expected None beside cu_seq_lens_q"):
        layer(hidden, attention_mask=torch.ones(1, 13, device=DEVICE), **options)
