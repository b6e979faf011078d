"""``install``: models built afterwards are accelerated, through transformers' own registry."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("transformers.monkey_patching", reason="this release has no registration")

from tests.models import FAMILIES, config, file_of, packing
from transformers import AutoModelForCausalLM
from transformers import monkey_patching as patching

from sluice.contract.errors import SluiceError
from sluice.integrations.transformers import (
    _takes_borders,
    install,
    is_accelerated,
    known_layers,
    plain_torch,
    restore,
    uninstall,
)
from sluice.testing.compare import assert_same_bits, assert_within

NAMES = [f"{prefix}GatedDeltaNet" for prefix, _ in FAMILIES.values()]
HANDS_ON = _takes_borders(file_of("qwen3_5").Qwen3_5GatedDeltaNet)
needs_borders = pytest.mark.skipif(not HANDS_ON, reason="this transformers drops packed borders")


@pytest.fixture(autouse=True)
def _undone():
    before = patching.get_patch_mapping()
    yield
    uninstall()
    assert patching.get_patch_mapping() == before


@pytest.fixture(scope="module")
def works():
    """Some releases need torchvision before any class can be registered; they are refused."""
    try:
        install()
    except SluiceError as reason:
        if "fails here" not in str(reason):
            raise
        for family in FAMILIES:
            assert not any(is_accelerated(layer) for layer in known_layers(build(family)))
        pytest.skip(str(reason))
    uninstall()


def build(family):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config(family)).eval()


@pytest.mark.usefixtures("works")
@needs_borders
@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_model_built_later_is_accelerated(family):
    stock = build(family)
    assert not any(is_accelerated(layer) for layer in known_layers(stock))
    install()
    install()  # twice has no further effect
    ours = build(family)
    assert len(known_layers(ours)) == 3
    assert all(is_accelerated(layer) for layer in known_layers(ours))
    ids = torch.arange(1, 30).unsqueeze(0)
    with torch.no_grad(), plain_torch(stock):
        exact = stock(ids).logits
        assert_within(ours(ids).logits, exact, 5e-5, name="logits")
        assert_same_bits(restore(ours)(ids).logits, exact, "restored")


@pytest.mark.usefixtures("works")
@needs_borders
def test_a_model_loaded_from_a_directory_is_accelerated(tmp_path):
    stock = build("qwen3_5")
    stock.save_pretrained(tmp_path)
    install()
    ours = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert all(is_accelerated(layer) for layer in known_layers(ours))
    assert list(ours.state_dict()) == list(stock.state_dict())
    ids = torch.arange(1, 30).unsqueeze(0)
    with torch.no_grad(), plain_torch(stock):
        assert_within(ours(ids).logits, stock(ids).logits, 5e-5, name="logits")
        twin = copy.deepcopy(ours)
        assert_same_bits(twin(ids).logits, ours(ids).logits, "copied")
        uninstall()
        again = pickle.loads(pickle.dumps(ours))
        assert all(is_accelerated(layer) for layer in known_layers(again))
        assert_same_bits(again(ids).logits, ours(ids).logits, "pickled")


@pytest.mark.usefixtures("works")
@needs_borders
def test_packed_sequences_of_a_model_built_later_do_not_leak_by_positions_alone_row_29():
    install()
    ours = build("qwen3_5")
    uninstall()
    position, borders, _ = packing((6, 11, 4))
    ids = torch.arange(1, 22).unsqueeze(0)
    with torch.no_grad():
        logits = ours(ids, position_ids=position.cpu(), use_cache=False).logits
        for a, b in itertools.pairwise(borders):
            assert_within(logits[:, a:b], ours(ids[:, a:b]).logits, 5e-5, name="logits")


@pytest.mark.usefixtures("works")
@needs_borders
def test_uninstall_leaves_built_models_as_they_are():
    install()
    assert set(NAMES) <= set(patching.get_patch_mapping())
    ours = build("qwen3_5")
    uninstall()
    uninstall()
    assert not set(NAMES) & set(patching.get_patch_mapping())
    assert all(is_accelerated(layer) for layer in known_layers(ours))
    assert not any(is_accelerated(layer) for layer in known_layers(build("qwen3_5")))


@pytest.mark.usefixtures("works")
@needs_borders
def test_a_layer_no_operator_serves_stays_stock_and_says_so():
    install()
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match=r"layer.activation: expected 'silu'"):
        model = AutoModelForCausalLM.from_config(config("qwen3_5", hidden_act="gelu"))
    assert not any(is_accelerated(layer) for layer in known_layers(model))


@pytest.mark.usefixtures("works")
@needs_borders
def test_a_class_that_someone_else_registered_is_not_taken_over():
    class Mine(torch.nn.Module):
        pass

    patching.register_patch_mapping({NAMES[1]: Mine})
    try:
        with pytest.raises(SluiceError, match=f"{NAMES[1]} is registered already"):
            install()
        assert patching.get_patch_mapping() == {NAMES[1]: Mine}
    finally:
        patching.unregister_patch_mapping([NAMES[1]])


@pytest.mark.skipif(HANDS_ON, reason="this transformers hands packed borders on")
def test_a_release_that_drops_packed_borders_is_refused():
    with pytest.raises(SluiceError, match="packed"):
        install()
