"""``accelerate``: transformers models give the same results, and remain transformers models."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from tests.models import (
    FAMILIES,
    close,
    new_cache,
    packing,
    ragged,
    states_of,
    stock_layer,
    stock_model,
    tokens,
)
from tests.suite import DEVICE

from sluice.contract.errors import ContractError
from sluice.integrations import transformers as integration
from sluice.integrations.transformers import (
    accelerate,
    is_accelerated,
    known_layers,
    plain_torch,
    restore,
)
from sluice.testing.compare import assert_same_bits, relative_error


@pytest.fixture(autouse=True)
def _inference():
    with torch.no_grad():
        yield


def test_prefill_decode_and_continuation_equal_stock(models):
    """One token or many after a cached prefix; stock without a cache is right in every release."""
    stock, ours = models
    cache, given = new_cache(stock), []
    for i, T in enumerate((70, 1, 1, 5, 1, 30, 1)):
        given.append(tokens(2, T, seed=i))
        exact = stock(torch.cat(given, dim=1), use_cache=False).logits[:, -T:]
        close(ours(given[-1], past_key_values=cache).logits, exact, f"call {i}")


def test_the_states_a_cache_gets_are_stock_s(models):
    caches = [new_cache(models[0]) for _ in range(2)]
    for ids in (tokens(2, 70), tokens(2, 1, seed=1), tokens(2, 1, seed=2)):
        for model, cache in zip(models, caches, strict=True):
            model(ids, past_key_values=cache)
        for i in (0, 1, 2):
            (conv, state), (conv_exact, exact) = (states_of(cache, i) for cache in caches[::-1])
            close(state, exact, "recurrent state")
            close(conv, conv_exact, "conv state")
            assert conv.shape[-1] == 4
            assert state.dtype == torch.float32


def test_the_cache_is_updated_in_place(models):
    stock, ours = models
    cache = new_cache(stock)
    ours(tokens(1, 9), past_key_values=cache)
    before = [x.data_ptr() for x in states_of(cache)]
    for T in (1, 3, 20):
        ours(tokens(1, T), past_key_values=cache)
    assert before == [x.data_ptr() for x in states_of(cache)]


def test_a_mask_that_has_padded_earlier_tokens_too_is_read_at_its_end_row_27(models):
    """Some releases pass it with every token that follows."""
    stock, ours = models
    layer, found = known_layers(ours)[0], []
    x = torch.randn(2, 6, layer.hidden_size, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    mask = torch.ones(2, 6, dtype=torch.int64, device=DEVICE)
    mask[0, :2] = 0
    for begin in (0, 5):
        cache = new_cache(stock)
        layer(x[:, :5], cache_params=cache, attention_mask=mask[:, :5])
        found.append(layer(x[:, 5:], cache_params=cache, attention_mask=mask[:, begin:]))
    assert_same_bits(*found, "the last token")


def test_right_padding_continues_as_if_it_were_not_there_row_27(models):
    """A batch of prompts padded on the right, then one token each: stock gets it wrong."""
    stock, ours = models
    lengths = (9, 14)
    ids, mask = ragged(lengths, "right")
    last = tokens(2, 1, seed=5)
    logits = {}
    for name, model in (("stock", stock), ("ours", ours)):
        cache = new_cache(stock)
        model(ids, attention_mask=mask, past_key_values=cache)
        more = torch.cat([mask, torch.ones_like(last)], dim=1)
        position = torch.tensor(lengths, device=DEVICE).view(2, 1)
        logits[name] = model(
            last, attention_mask=more, position_ids=position, past_key_values=cache
        ).logits
    alone = torch.cat([ids[:1, : lengths[0]], last[:1]], dim=1)
    exact = stock(alone).logits[:, -1:]
    close(logits["ours"][:1], exact)
    assert relative_error(logits["stock"][:1], exact) > 0.01
    close(logits["ours"][1:], logits["stock"][1:], "the row without padding")


def layers_only(model, ids, options):
    """The output of the first layer: full attention detects packed sequences in other ways."""
    seen = []
    handle = known_layers(model)[0].register_forward_hook(lambda m, a, y: seen.append(y))
    model(ids, **options)
    handle.remove()
    return seen[0]


def test_packed_sequences_do_not_leak_row_29(models):
    stock, ours = models
    lengths = (6, 11, 4)
    ids = tokens(1, sum(lengths))
    position, borders, numbers = packing(lengths)
    packed = {"position_ids": position, "cu_seq_lens_q": borders, "use_cache": False}
    logits = ours(ids, **packed).logits
    for a, b in itertools.pairwise(borders):
        close(logits[:, a:b], stock(ids[:, a:b]).logits)
    leaked = stock(ids, **packed).logits  # its torch functions ignore packing
    assert relative_error(leaked[:, lengths[0] :], logits[:, lengths[0] :]) > 0.01
    by_number = {"position_ids": position, "seq_idx": numbers, "use_cache": False}
    assert_same_bits(layers_only(ours, ids, by_number), layers_only(ours, ids, packed), "seq_idx")
    both = {**packed, "seq_idx": numbers}
    assert_same_bits(ours(ids, **both).logits, logits, "both")
    with pytest.raises(ContractError, match=r"seq_idx: expected shape \[1, 21\]"):
        ours(ids, position_ids=position, seq_idx=numbers[:, 1:], use_cache=False)


def test_a_cpu_model_runs_where_the_stock_choice_of_fla_crashes_row_28(monkeypatch):
    """transformers chooses FLA at import, whatever the device; on a CPU Triton then raises."""
    stock = stock_model("qwen3_next")
    if hasattr(known_layers(stock)[0], "chunk_gated_delta_rule"):
        pytest.skip("this transformers chooses for each layer, and looks at the device")
    ids = tokens(1, 9, device="cpu")
    with plain_torch(stock):
        exact = stock(ids).logits
    file = sys.modules[type(stock).__module__]

    def no_driver(*args, **kwargs):
        raise RuntimeError("0 active drivers ([]). There should only be one.")

    for name in ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"):
        monkeypatch.setattr(file, name, no_driver)
    with pytest.raises(RuntimeError, match="active drivers"):
        stock(ids)
    ours = accelerate(stock)
    close(ours(ids).logits, exact)
    assert ours.generate(ids[:, :5], max_new_tokens=3, do_sample=False).shape == (1, 8)


def test_gradients_from_a_cache_run_on_a_cpu_where_fla_was_chosen_row_28(monkeypatch):
    """The stock forward serves them, with the torch functions that FLA's have replaced."""
    stock = stock_model("qwen3_next")
    if hasattr(known_layers(stock)[0], "chunk_gated_delta_rule"):
        pytest.skip("this transformers chooses for each layer, and looks at the device")
    file = sys.modules[type(stock).__module__]
    names = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")
    for name in names:
        plain = inspect.unwrap(getattr(file, name))

        @functools.wraps(plain)
        def no_driver(*args, **kwargs):
            raise RuntimeError("0 active drivers ([]). There should only be one.")

        monkeypatch.setattr(file, name, no_driver)
    ours, cache, ids = accelerate(stock), new_cache(stock), tokens(1, 12, device="cpu")
    chosen = [getattr(file, name) for name in names]
    ours(ids[:, :9], past_key_values=cache)
    monkeypatch.setattr(integration, "_warned", set())
    with torch.enable_grad(), pytest.warns(UserWarning, match="gradients from a cache"):
        logits = ours(ids[:, 9:], past_key_values=cache).logits
    assert logits.requires_grad
    close(logits, ours(ids, use_cache=False).logits[:, 9:])
    assert [getattr(file, name) for name in names] == chosen


READ_AGAIN = """
import sys, torch
model, ids, want = torch.load(sys.argv[1], weights_only=False)
from sluice.integrations.transformers import is_accelerated, known_layers
assert all(map(is_accelerated, known_layers(model)))
with torch.no_grad():
    assert torch.equal(model(ids).logits, want)
"""


def test_an_accelerated_model_is_pickled_and_read_in_another_process(tmp_path):
    """As torch.save, pickle and a spawned process do."""
    pytest.importorskip("transformers.models.qwen3_5", reason="not in this transformers")
    ours, ids = accelerate(stock_model("qwen3_5", r=2, device="cpu")), tokens(1, 9, device="cpu")
    want = ours(ids).logits
    path = tmp_path / "model"
    torch.save((ours, ids, want), path)
    subprocess.run([sys.executable, "-c", READ_AGAIN, str(path)], check=True)
    again = pickle.loads(pickle.dumps(ours))
    layers = known_layers(again)
    assert all(map(is_accelerated, layers))
    assert not {id(x) for x in layers} & {id(x) for x in known_layers(ours)}
    for p in ours.parameters():
        p.zero_()  # the copy has parameters of its own
    assert_same_bits(again(ids).logits, want, "logits")
    assert not any(map(is_accelerated, known_layers(restore(again))))
    with plain_torch(again):
        close(again(ids).logits, want)


def test_a_cache_that_records_its_past_is_left_to_transformers(models, monkeypatch):
    stock, ours = models
    monkeypatch.setattr(integration, "_warned", set())
    caches = [new_cache(stock) for _ in range(2)]
    if not hasattr(getattr(caches[0], "layers", [None])[0], "activate_past_recording"):
        pytest.skip("this transformers records no past")
    for cache in caches:
        for layer in cache.layers:
            if hasattr(layer, "activate_past_recording"):
                layer.activate_past_recording()
    with pytest.warns(UserWarning, match="records its past"):
        mine = ours(tokens(1, 9), past_key_values=caches[1]).logits
    close(mine, stock(tokens(1, 9), past_key_values=caches[0]).logits)
    shapes = [states_of(cache)[0].shape for cache in caches]
    assert shapes[0] == shapes[1]


def test_restore_leaves_no_hook():
    model = accelerate(stock_model("qwen3_next"))
    assert any(module._forward_pre_hooks for module in model.modules())
    restore(model)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_restore_gives_the_stock_bits_back(models):
    stock, ours = models
    ids = tokens(1, 20)
    exact = stock(ids).logits
    assert restore(ours) is ours
    assert_same_bits(ours(ids).logits, exact, "restored")
    assert all("forward" not in layer.__dict__ for layer in known_layers(ours))
    restore(ours)
    accelerate(accelerate(ours))
    close(ours(ids).logits, exact)
    assert_same_bits(restore(ours)(ids).logits, exact, "restored after twice")


def test_state_dict_modules_and_copies_stay_what_they_were(models):
    stock, ours = models
    assert list(ours.state_dict()) == list(stock.state_dict())
    assert [n for n, _ in ours.named_modules()] == [n for n, _ in stock.named_modules()]
    twin = copy.deepcopy(ours)
    for layer in known_layers(twin):
        layer.out_proj.weight.data.zero_()
    ids = tokens(1, 9)
    close(ours(ids).logits, stock(ids).logits)
    for layer in known_layers(stock):
        layer.out_proj.weight.data.zero_()
    close(twin(ids).logits, stock(ids).logits, "the copy")


def test_weights_loaded_or_moved_afterwards_are_used(models):
    stock, ours = models
    other = copy.deepcopy(stock)
    for layer in known_layers(other):
        layer.A_log.data.add_(1.0)
    ours.load_state_dict(other.state_dict(), assign=True)
    ids = tokens(1, 40)
    close(ours(ids).logits, other(ids).logits)
    half = ours.to(torch.bfloat16)(ids).logits
    assert half.dtype == torch.bfloat16
    assert relative_error(half, other(ids).logits) < 0.1


def test_unknown_layers_are_left_alone_and_none_known_is_refused():
    class MyGatedDeltaNet(nn.Module):
        def forward(self, x):
            return x

    mixed = nn.ModuleList([stock_layer("qwen3_next"), MyGatedDeltaNet()])
    accelerate(mixed)
    assert "forward" in mixed[0].__dict__
    assert "forward" not in mixed[1].__dict__
    with pytest.raises(ContractError, match=r"accelerate: model: .*Qwen3_5GatedDeltaNet"):
        accelerate(nn.Linear(2, 2))


def test_a_layer_that_is_refused_leaves_the_others_as_they_were():
    layers = nn.ModuleList([stock_layer("qwen3_next"), stock_layer("qwen3_next")])
    layers[1].activation = "gelu"
    with pytest.raises(ContractError, match="activation"):
        accelerate(layers)
    assert not any(integration.is_accelerated(layer) for layer in layers)


class Hook:
    """Stands in for a hook of the accelerate package."""

    def __init__(self):
        self.calls = []

    def pre_forward(self, module, *args, **kwargs):
        self.calls.append(("pre", type(module).__name__))
        return args, kwargs

    def post_forward(self, module, output):
        self.calls.append(("post", type(module).__name__))
        return output


def hooked(layer, hook):
    """Wrap a layer's forward as accelerate's ``add_hook_to_module`` does."""
    layer._old_forward = layer.forward

    def forward(*args, **kwargs):
        hook.calls.append(("pre", "layer"))
        return layer._old_forward(*args, **kwargs)

    layer.forward = forward
    layer.conv1d._hf_hook = hook
    layer.norm._hf_hook = hook
    return layer


def test_hooks_of_offloaded_weights_still_fire():
    layer, hook = stock_layer("qwen3_next", device=DEVICE), Hook()
    x = torch.randn(1, 9, 48, device=DEVICE)
    with plain_torch(layer):
        exact = layer(x)
    accelerate(hooked(layer, hook))
    close(layer(x), exact)
    fired = [("pre", "layer"), ("pre", "Conv1d"), ("pre", "Qwen3NextRMSNormGated")]
    assert hook.calls == [*fired, ("post", "Qwen3NextRMSNormGated"), ("post", "Conv1d")]
    restore(layer)
    with plain_torch(layer):
        assert_same_bits(layer(x), exact, "restored")


def test_a_forward_that_was_replaced_before_comes_back():
    layer, x = stock_layer("qwen3_next"), torch.randn(1, 9, 48)
    layer.forward = lambda *args, **kwargs: "mine"
    assert restore(accelerate(layer))(x) == "mine"


def test_importing_the_adapter_does_not_import_transformers():
    code = (
        "import sys, sluice, sluice.layers, sluice.integrations.transformers\n"
        "assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_family_is_covered():
    assert set(FAMILIES) == {"qwen3_next", "qwen3_5", "qwen3_5_moe"}
