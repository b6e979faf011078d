"""Recipes for inputs do what their names say."""

import subprocess
import sys

import pytest
import torch

from sluice.testing import inputs as draw
from sluice.testing.compare import assert_same_bits


def cosines(kind: str) -> torch.Tensor:
    x = draw.keys(draw.generator(), 1, 12, 2, 64, kind)[0].transpose(0, 1)  # [H, T, K]
    assert x.norm(dim=-1).sub(1).abs().max() < 1e-12
    return x @ x.mT


def test_keys_are_as_alike_as_their_kind():
    off = ~torch.eye(12, dtype=torch.bool)
    assert cosines("random")[:, off].abs().max() < 0.7
    assert cosines("correlated")[:, off].min() > 0.9
    assert cosines("correlated")[:, off].max() < 0.999
    repeated = cosines("repeated")
    assert (repeated[:, 0, 4::4] > 1 - 1e-12).all()
    assert (repeated[:, 0, 1:4] < 0.9).all()
    assert (cosines("identical") > 1 - 1e-12).all()
    with pytest.raises(ValueError, match="kind of keys"):
        draw.keys(draw.generator(), 1, 1, 1, 1, "other")


@pytest.mark.parametrize("K", [None, 5], ids=["per_head", "per_key"])
def test_gates_reach_from_no_decay_to_all_of_it(K):
    def g(kind):
        return draw.decay(**draw.raw_decay(draw.generator(), 2, 50, 6, kind, K))

    tail = () if K is None else (K,)
    assert g("mild").shape == (2, 50, 6, *tail)
    assert (g("mild") <= 0).all()
    assert (g("weak") == 0).all()
    strong = g("strong").sum(dim=1)
    assert strong.max() < -10
    assert strong.median() < -50
    assert strong.min() < -104  # exp of it is zero in float32
    mixed = g("mixed")
    assert (mixed[:, :, ::3] == 0).all()
    assert (mixed[:, :, 1::3].sum(dim=1) < -10).all()
    assert (mixed[:, :, 2::3].sum(dim=1) > -50).all()
    with pytest.raises(ValueError, match="kind of gates"):
        g("other")


def test_beta_of_ones_is_one_in_float32():
    b = draw.raw_beta(draw.generator(), 1, 3, 2, ones=True)
    assert (b.to(torch.bfloat16).float().sigmoid() == 1).all()


def test_raw_gates_are_finite():
    raw = draw.raw_decay(draw.generator(), 1, 4, 3, "weak")
    assert all(torch.isfinite(x.float()).all() for x in raw.values())
    assert raw["A_log"].float().exp().max() < 1e-11


def test_packed_views_share_one_projection():
    gen = draw.generator()
    q, v = draw.normal(gen, 2, 3, 2, 4), draw.normal(gen, 2, 3, 5)
    a, b = draw.packed_views([q, v], torch.float32, spare=7)
    assert a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
    assert a.stride() == (60, 20, 4, 1)
    assert b.stride() == (60, 20, 1)
    assert_same_bits(a, q.float(), "q")
    assert_same_bits(b, v.float(), "v")
    assert a._base is not None
    assert torch.isnan(a._base[..., -7:]).all()


def test_cu_seqlens_allow_empty_sequences_and_none():
    bounds = draw.cu_seqlens((3, 0, 2))
    assert bounds.tolist() == [0, 3, 3, 5]
    assert bounds.dtype == torch.int32
    assert draw.cu_seqlens((), torch.int64).tolist() == [0]


def test_a_poisoned_pool_is_valid_where_it_is_used_only():
    pool = draw.poisoned_pool(torch.ones(5, 2, 3), [4, 1])
    assert torch.isnan(pool).all(dim=2).all(dim=1).tolist() == [True, False, True, True, False]
    assert (pool[[1, 4]] == 1).all()


@pytest.mark.parametrize("order", [None, "ld"])
def test_a_padded_pool_has_nan_between_its_rows(order):
    pool = draw.normal(draw.generator(), 3, 4, 5)
    view = draw.padded_pool(pool, gap=6, order=order)
    assert_same_bits(view, pool, "values")
    assert view.stride() == ((26, 1, 4) if order == "ld" else (26, 5, 1))
    storage = view.as_strided((3, 26), (26, 1), 0)
    assert torch.isnan(storage[:, 20:]).all()
    assert torch.isfinite(storage[:, :20]).all()
    assert draw.padded_pool(pool[:0], gap=6, order=order).shape == (0, 4, 5)


def test_slots_differ_and_keep_clear_of_the_reserved_one():
    rows = draw.choose_slots(draw.generator(), 9, 8, first=1)
    assert sorted(rows) == list(range(1, 9))
    assert rows != sorted(rows)


def test_nan_empty_fills_every_way_to_uninitialised_memory():
    """Reliability row 24."""
    names = [(owner, name, getattr(owner, name)) for owner, name in draw._EMPTY]
    x = torch.zeros(3, dtype=torch.bfloat16)
    with draw.nan_empty():
        made = [
            torch.empty(2, 2),
            torch.empty((3,), dtype=torch.float64),
            torch.empty_like(x),
            torch.empty_strided((2, 2), (1, 2)),
            x.new_empty(4),
            x.new_empty_strided((2,), (1,)),
            torch.empty(2, requires_grad=True),
        ]
        counts = torch.empty(3, dtype=torch.int64)
        workspace = torch.empty(16, dtype=torch.uint8)
    assert all(torch.isnan(t).all() for t in made)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        assert torch.isnan(workspace.view(dtype)).all()
    assert counts.dtype == torch.int64
    assert made[2].dtype == made[4].dtype == torch.bfloat16
    for owner, name, original in names:
        assert getattr(owner, name) is original, name


def test_nan_empty_is_undone_by_an_error():
    original = torch.empty
    with pytest.raises(RuntimeError, match="inside"), draw.nan_empty():
        raise RuntimeError("inside")
    assert torch.empty is original


def test_nan_empty_leaves_the_default_device_alone():
    """In a new process: torch lists its tensor constructors when it first needs the list."""
    code = """
import torch
from sluice.testing.inputs import nan_empty
with nan_empty(), torch.device("meta"):
    print(torch.empty(2).device)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["meta"]


def test_a_dropped_store_shows_under_nan_empty():
    def doubles(x):  # forgets the last element
        out = torch.empty_like(x)
        out[:-1] = 2 * x[:-1]
        return out

    with draw.nan_empty():
        assert torch.isnan(doubles(torch.ones(4))).any()
