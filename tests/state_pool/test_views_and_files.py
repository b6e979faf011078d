"""StatePool: geometry, snapshots, files, engines' layouts (reliability row 16), and sizes."""

from __future__ import annotations

import errno
import json
import os
import sys
from dataclasses import replace

import pytest
import torch

from sluice.contract.errors import ContractError
from sluice.layers.qwen import preset
from sluice.state_pool import (
    GeometryError,
    MissingDependencyError,
    PoolError,
    PoolGeometry,
    StatePool,
    StateSnapshot,
    parse_bytes,
)
from tests.state_pool.pools import (
    SMALL,
    VARIANTS,
    P,
    bits,
    other_snapshot,
    paged,
    paged_pool,
    read,
    same,
    write,
)

# ---- geometry, snapshots, files ------------------------------------------------------------------

CHANGES = [
    {"layers": 3},
    {"num_v_heads": 1},
    {"conv_channels": 6},
    {"head_k_dim": 4},
    {"head_v_dim": 3},
    {"conv_columns": 4},
    {"state_dtype": torch.bfloat16},
    {"conv_dtype": torch.float16},
    {"tag": "rank 1"},
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda c: next(iter(c)))
def test_each_field_of_the_geometry_refuses_a_restore(change):
    pool = StatePool(SMALL, 2)
    (name,) = change
    with pytest.raises(GeometryError, match=f"{name}: expected .*, got ") as caught:
        pool.restore(other_snapshot(**change))
    assert SMALL.digest in str(caught.value)
    assert str(change[name]) in str(caught.value)


def test_the_geometry_hash_is_the_same_in_every_process_and_version():
    # a literal: with another value, every file saved before would be refused
    assert PoolGeometry.for_model("qwen3.5-27b", tp=4).digest == "96c528bb8a280e6f"
    assert PoolGeometry.from_json(SMALL.to_json()) == SMALL


def test_storage_is_no_part_of_the_geometry():
    contents = []
    snapshot = None
    for make in VARIANTS.values():
        pool = make()
        if snapshot is None:
            slots = pool.allocate(2)
            for slot in slots:
                write(pool, slot, 7 + slot)
            snapshot = pool.snapshot(slots)
        else:
            slots = pool.restore(snapshot)
        contents.append([read(pool, slot) for slot in slots])
        snapshot = pool.snapshot(slots)
    for other in contents[1:]:
        assert all(map(same, contents[0], other))


def test_a_snapshot_shares_no_memory_with_the_pool(pool):
    (slot,) = pool.allocate()
    write(pool, slot, 3)
    before = read(pool, slot)
    snapshot = pool.snapshot(slot)
    write(pool, slot, 4)
    pool.restore(snapshot, slot)
    snapshot.conv.zero_()
    snapshot.recurrent.zero_()
    assert same(read(pool, slot), before)


def test_a_snapshot_whose_tensors_contradict_its_geometry_is_refused():
    good = other_snapshot()
    with pytest.raises(GeometryError, match=r"recurrent: expected \[2, 1, 2, 4, 3\]"):
        StateSnapshot(SMALL, good.conv, good.recurrent.mT)
    with pytest.raises(GeometryError, match=r"conv: .*bfloat16, got .*float32"):
        StateSnapshot(SMALL, good.conv.float(), good.recurrent)


@pytest.mark.parametrize("n", [0, 1, 3])
def test_save_and_load_keep_every_bit(n, pool, tmp_path):
    slots = pool.allocate(n)
    for slot in slots:
        write(pool, slot, 11 + slot)
    expected = [read(pool, slot) for slot in slots]
    pool.save(tmp_path / "state.safetensors", slots[::-1])
    other = StatePool(SMALL, 9, conv_order="ld", state_layout="kv")
    other.allocate(2)
    loaded = other.load(tmp_path / "state.safetensors")
    assert loaded == list(range(2, 2 + n))
    assert all(map(same, [read(other, slot) for slot in loaded[::-1]], expected))


def test_save_takes_all_slots_in_use_unless_told(tmp_path):
    pool = StatePool(SMALL, P)
    slots = pool.allocate(3)
    pool.free(slots[1])
    pool.save(tmp_path / "all")
    assert len(StateSnapshot.load(tmp_path / "all")) == 2


def test_a_saved_file_names_geometry_and_version(tmp_path):
    safetensors = pytest.importorskip("safetensors")
    other_snapshot().save(tmp_path / "state")
    with safetensors.safe_open(str(tmp_path / "state"), framework="pt") as file:
        about = file.metadata()
    assert about["format"] == "sluice.state"
    assert about["version"] == "1"
    assert json.loads(about["geometry"])["conv_channels"] == 5
    assert about["digest"] == SMALL.digest
    assert [p.name for p in tmp_path.iterdir()] == ["state"]


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"version": "2"}, PoolError, "version '1', got 'sluice.state' version '2'"),
        ({"format": "pt"}, PoolError, "expected format 'sluice.state'"),
        ({"digest": "0" * 16}, GeometryError, "got 0000000000000000"),
        ({"geometry": "{"}, PoolError, "expected a state snapshot"),
        ({"geometry": "{}"}, PoolError, "expected a state snapshot"),
        ({"geometry": replace(SMALL, layers=3).to_json()}, GeometryError, "expected geometry"),
    ],
)
def test_a_file_that_is_no_snapshot_is_refused(change, error, words, tmp_path):
    files = pytest.importorskip("safetensors.torch")
    snapshot = other_snapshot()
    about = {"format": "sluice.state", "version": "1", "geometry": SMALL.to_json()}
    tensors = {"conv": snapshot.conv, "recurrent": snapshot.recurrent}
    path = tmp_path / "state"
    files.save_file(tensors, str(path), metadata=about | {"digest": SMALL.digest} | change)
    with pytest.raises(error, match=words):
        StateSnapshot.load(path)


def test_a_file_of_something_else_or_cut_short_is_refused(tmp_path):
    files = pytest.importorskip("safetensors.torch")
    path = tmp_path / "state"
    path.write_bytes(b"not a file of tensors")
    with pytest.raises(PoolError, match="expected a state snapshot"):
        StateSnapshot.load(path)
    files.save_file({"weight": torch.zeros(2)}, str(path))
    with pytest.raises(PoolError, match=r"expected format 'sluice\.state'"):
        StateSnapshot.load(path)
    other_snapshot().save(path)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(PoolError, match="expected a state snapshot"):
        StateSnapshot.load(path)


def test_one_wrong_bit_in_a_file_is_noticed(tmp_path):
    pytest.importorskip("safetensors")
    path = tmp_path / "state"
    snapshot = other_snapshot()
    snapshot.save(path)
    content = path.read_bytes()
    for place in (*range(0, len(content), 7), len(content) - 1):
        broken = bytearray(content)
        broken[place] ^= 1 << place % 8
        path.write_bytes(broken)
        with pytest.raises(PoolError, match="load: "):
            StateSnapshot.load(path)
    path.write_bytes(content)
    assert torch.equal(StateSnapshot.load(path).recurrent, snapshot.recurrent)


def test_a_damaged_file_leaves_the_pool_as_it_was(tmp_path):
    pytest.importorskip("safetensors")
    path = tmp_path / "state"
    other_snapshot().save(path)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    pool = StatePool(SMALL, P)
    mine = pool.allocate(1)
    before = [x.clone() for x in pool.layer(0)], pool.available
    with pytest.raises(PoolError, match="the file is damaged"):
        pool.load(path)
    with pytest.raises(PoolError, match="the file is damaged"):
        pool.load(path, mine)
    assert pool.available == before[1]
    for x, y in zip(pool.layer(0), before[0], strict=True):
        assert torch.equal(x, y)


def test_a_save_that_fails_leaves_the_older_file(tmp_path, monkeypatch):
    pytest.importorskip("safetensors")
    path = tmp_path / "state"
    other_snapshot().save(path)
    before = path.read_bytes()

    def disk_full(number):
        raise OSError(errno.ENOSPC, "simulated")

    monkeypatch.setattr(os, "fsync", disk_full)
    newer = other_snapshot()
    newer.recurrent.fill_(1.0)
    with pytest.raises(PoolError, match="got: simulated; a file that was there is as it was"):
        newer.save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_without_safetensors_the_error_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    for call in (other_snapshot().save, StateSnapshot.load):
        with pytest.raises(MissingDependencyError, match=r"pip install 'sluice-gdn\[pool\]'"):
            call(tmp_path / "state")


@pytest.mark.parametrize(
    "change",
    [{"layers": 0}, {"conv_columns": -1}, {"num_v_heads": 1.5}, {"state_dtype": torch.int8}],
)
def test_an_impossible_geometry_is_refused_by_name(change):
    (name,) = change
    with pytest.raises(ContractError, match=name):
        replace(SMALL, **change)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"slots": 0}, "slots"),
        ({"slots": 1, "reserve_slot_0": True}, "slots"),
        ({"slots": 2, "state_layout": "vv"}, "state_layout"),
        ({"slots": 2, "conv_order": "bd"}, "conv_order"),
    ],
)
def test_an_impossible_pool_is_refused_by_name(arguments, name):
    with pytest.raises(ContractError, match=f"StatePool: {name}"):
        StatePool(SMALL, **arguments)


def test_a_pool_made_in_inference_mode_may_be_written_outside_it():
    with torch.inference_mode():
        pool = StatePool(SMALL, P)
    (slot,) = pool.allocate()
    write(pool, slot, 1)
    with torch.inference_mode():
        snapshot = pool.snapshot(slot)
    assert same(read(pool, pool.restore(snapshot)[0]), read(pool, slot))


# ---- engines' layouts ----------------------------------------------------------------------------


def address(tensor, *index):
    return tensor[index].data_ptr()


@pytest.mark.parametrize("state_layout", ["vk", "kv"])
@pytest.mark.parametrize("conv_order", ["dl", "ld"])
def test_every_view_is_the_same_memory(state_layout, conv_order):
    pool = StatePool(SMALL, P, state_layout=state_layout, conv_order=conv_order)
    vllm, sglang, hf = pool.vllm_views(), pool.sglang_views(), pool.transformers_views()
    for i in range(SMALL.layers):
        conv, state = pool.layer(i)
        assert conv.shape == (P, 5, 3)
        assert state.shape == ((P, 2, 4, 3) if state_layout == "vk" else (P, 2, 3, 4))
        there = (4, 1, 3, 2) if state_layout == "vk" else (4, 1, 2, 3)  # v = 3, k = 2
        at = address(state, *there)
        assert at == address(vllm[i][1], 4, 1, 3, 2)
        assert at == address(sglang[1], i, 4, 1, 3, 2)
        assert at == address(hf[i][1], 4, 1, 2, 3)
        assert at == address(pool.recurrent, i, *there)
        at = address(conv, 4, 3, 1)
        assert at == address(vllm[i][0], 4, 1, 3)
        assert at == address(sglang[0], i, 4, 3, 1) == address(pool.conv, i, 4, 3, 1)
        assert at == address(hf[i][0], 4, 3, 1)


def test_a_layer_that_is_not_there_is_refused(pool):
    for index in (-1, SMALL.layers):
        with pytest.raises(ContractError, match=rf"index: expected 0\.\.1, got {index}"):
            pool.layer(index)


def test_each_engine_finds_its_own_contiguous_order():
    for conv, state in StatePool(SMALL, P, conv_order="ld").vllm_views():
        assert conv.is_contiguous()
        assert state.is_contiguous()
    assert all(view.is_contiguous() for view in StatePool(SMALL, P).sglang_views())
    for conv, state in StatePool(SMALL, P, state_layout="kv").transformers_views():
        assert conv.is_contiguous()
        assert state.is_contiguous()


def test_pages_of_an_engine_are_used_in_place_and_nothing_else_is_touched():
    """Reliability row 16: of a page's conv, gap, state and padding, gap and padding stay."""
    slabs, conv, state = paged()
    pool = StatePool.from_tensors(conv, state, conv_order="ld")
    assert pool.geometry == SMALL
    assert pool.layer(1)[0].data_ptr() == conv[1].data_ptr()
    assert pool.layer(1)[1].data_ptr() == state[1].data_ptr()
    assert all((slab == 0xFF).all() for slab in slabs)  # nothing was cleared
    a, b = pool.allocate(2)
    write(pool, a, 5)
    pool.restore(pool.snapshot(a), b)
    assert torch.equal(bits(state[0][a]), bits(state[0][b]))
    pool.free([a, b])
    assert pool.allocate(P) == list(range(P))
    for slab in slabs:
        pages = slab.view(P, -1)
        assert not pages[:, :30].any()
        assert (pages[:, 30:32] == 0xFF).all()
        assert not pages[:, 32:128].any()
        assert (pages[:, 128:] == 0xFF).all()


def test_claimed_rows_keep_what_the_engine_wrote():
    _, conv, state = paged()
    state[0][3] = 2.5
    pool = StatePool.from_tensors(conv, state, conv_order="ld")
    (slot,) = pool.claim(3)
    assert (pool.snapshot(slot).recurrent[0] == 2.5).all()
    assert pool.allocate(4) == [0, 1, 2, 4]


def test_a_stack_of_layers_is_adopted_whatever_its_strides():
    conv = torch.zeros(P, 2, 5, 3, dtype=torch.bfloat16).transpose(0, 1)  # slots outermost
    state = torch.zeros(2, P + 3, 2, 4, 3)[:, 2:-1]
    pool = StatePool.from_tensors(conv, state, tag="x")
    assert pool.geometry == replace(SMALL, tag="x")
    assert pool.conv.data_ptr() == conv.data_ptr()
    assert pool.sglang_views()[1].data_ptr() == state.data_ptr()


def test_layers_adopted_one_by_one_have_no_common_tensor():
    with pytest.raises(PoolError, match=r"2 separate ones; use layer\(i\)"):
        paged_pool().sglang_views()


CONV, STATE = torch.zeros(2, P, 5, 3), torch.zeros(2, P, 2, 4, 3)


@pytest.mark.parametrize(
    ("conv", "state", "words"),
    [
        (CONV[0], STATE, "conv: expected 4 dims, or 3 for each layer apart"),
        (CONV, STATE[0], "recurrent: expected 5 dims"),
        (CONV, STATE[:, :-1], r"conv: expected layers, slots \[2, 5\]"),
        (CONV[:1], STATE, r"conv: expected layers, slots \[2, 6\]"),
        (list(CONV), list(STATE)[:1], "recurrent: expected as many layers as conv, 2"),
        ([], [], "at least one"),
        ([CONV[0], CONV[1, :-1]], list(STATE), r"conv, layer 1: expected \[6, 5, 3\]"),
        (list(CONV), [STATE[0], STATE[1].double()], "recurrent, layer 1: .*float32.*float64"),
        ([CONV[0], CONV[0]], list(STATE), "conv: expected memory of its own per layer"),
        (CONV[:, :1].expand(2, P, 5, 3), STATE, "conv: expected strides that do not overlap"),
        (CONV, STATE.mT, "recurrent: expected the last three dims contiguous"),
        (CONV, STATE.to(torch.int32), "state_dtype"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name_and_layer(conv, state, words):
    with pytest.raises(ContractError, match=words):
        StatePool.from_tensors(conv, state)


# ---- size ----------------------------------------------------------------------------------------

MIB = 2**20
# recurrent state in MiB, float32, all linear layers: published figures, not computed here
STATE_MIB = {
    "Qwen3-Next-80B-A3B": 72,
    "Qwen3-Coder-Next": 72,
    "Qwen3.5-0.8B": 18,
    "Qwen3.5-2B": 18,
    "Qwen3.5-4B": 48,
    "Qwen3.5-9B": 48,
    "Qwen3.5-27B": 144,
    "Qwen3.6-27B": 144,
    "Qwen3.8-27B": 144,
    "Qwen3.5-35B-A3B": 60,
    "Qwen3.6-35B-A3B": 60,
    "Qwen3.5-122B-A10B": 144,
    "Qwen3.5-397B-A17B": 180,
    "Qwen3.8-2.4T-A95B": 552,
    "Qwen3.8-Flash-Next": 108,
}
# conv channels · 3 columns · 2 bytes · linear layers, by hand
CONV_BYTES = {"Qwen3.5-0.8B": 663_552, "Qwen3.5-27B": 2_949_120, "Qwen3.8-2.4T": 8_478_720}


@pytest.mark.parametrize("name", STATE_MIB)
def test_bytes_of_a_sequence_are_the_published_state_and_its_conv_window(name):
    shape = preset(name)
    conv = StatePool.bytes_per_sequence(name) - STATE_MIB[name] * MIB
    assert conv == CONV_BYTES.get(shape.name, conv)
    assert conv == shape.conv_channels * 3 * 2 * shape.linear_layers
    # halving the state dtype halves that part alone; TP 2 halves both
    half = StatePool.bytes_per_sequence(name, state_dtype=torch.bfloat16)
    assert half == STATE_MIB[name] * MIB // 2 + conv
    assert StatePool.bytes_per_sequence(name, tp=2) * 2 == StatePool.bytes_per_sequence(name)
    assert StatePool.bytes_per_sequence(name, conv_columns=6) == STATE_MIB[name] * MIB + 2 * conv


def test_the_calculator_tells_what_storage_really_takes():
    pool = StatePool.for_model("qwen3.5-0.8b", slots=3, tp=16, conv_columns=5)
    storage = pool.conv.untyped_storage().nbytes() + pool.recurrent.untyped_storage().nbytes()
    assert storage == 3 * StatePool.bytes_per_sequence("qwen3.5-0.8b", tp=16, conv_columns=5)


def test_how_many_sequences_of_the_27b_fit_in_20_gb_at_tp_4():
    # 48 layers of 12 heads · 64 KiB and 2,560 channels · 3 · 2 bytes: 38,486,016 bytes each
    def fit(memory, **options):
        return StatePool.sequences_that_fit(memory, "qwen3.5-27b", tp=4, **options)

    assert fit("20 GB") == fit(20 * 10**9) == fit("20000 mb") == 519
    assert fit("20GiB") == fit("20 gib") == 557
    assert fit("20 GB", state_dtype=torch.bfloat16) == 1019
    assert fit("20 GB", reserve_slot_0=True) == 518
    assert fit(38_486_016) == 1
    assert fit(38_486_015) == fit(0) == 0
    assert fit(0, reserve_slot_0=True) == 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1", 1),
        ("7 B", 7),
        ("2 kB", 2000),
        ("2KiB", 2048),
        ("0.5 MiB", 524_288),
        (" 3 TB ", 3 * 10**12),
        ("0.1 GB", 100_000_000),
        (12, 12),
    ],
)
def test_sizes_are_read_exactly(text, expected):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("memory", ["20 G", "twenty GB", "-1 GB", "", "1e9", -1, 2.5, True, "GB"])
def test_a_size_that_cannot_be_read_is_refused(memory):
    with pytest.raises(ContractError, match="memory: expected bytes"):
        parse_bytes(memory)


def test_a_model_refuses_fewer_conv_columns_than_its_window():
    with pytest.raises(ContractError, match="conv_columns: expected at least W - 1 = 3"):
        StatePool.for_model("qwen3.5-0.8b", slots=1, conv_columns=2)
    with pytest.raises(ContractError, match="did you mean"):
        StatePool.for_model("qwen3.5-0.7b", slots=1)


def test_a_pool_for_a_model_takes_a_name_or_a_shape_and_every_option():
    options = {
        "tp": 8,
        "conv_columns": 4,
        "state_dtype": torch.bfloat16,
        "conv_dtype": torch.float32,
        "state_layout": "kv",
        "conv_order": "ld",
        "reserve_slot_0": True,
        "tag": "rank 3",
    }
    pool = StatePool.for_model(preset("qwen3.5-0.8b"), 2, **options)
    assert pool.geometry == StatePool.for_model("qwen3.5-0.8b", slots=2, **options).geometry
    assert pool.geometry == PoolGeometry(
        layers=18,
        num_v_heads=2,
        conv_channels=768,
        conv_columns=4,
        state_dtype=torch.bfloat16,
        conv_dtype=torch.float32,
        tag="rank 3",
    )
    conv, state = pool.layer(17)
    assert (conv.shape, conv.dtype) == ((2, 768, 4), torch.float32)
    assert (state.shape, state.dtype) == ((2, 2, 128, 128), torch.bfloat16)
    assert conv.stride() == (768 * 4, 1, 768)
