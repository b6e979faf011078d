"""SGLang's own backend class, pools and metadata, with the plug-in's kernels, on a CPU.

SGLang's kernels need a GPU, so the judge is the layer over each sequence alone.
``test_sglang_engine.py`` runs the whole engine.
"""
# ruff: noqa: E402

from __future__ import annotations

import importlib
import unittest
from types import SimpleNamespace

import pytest
import torch

from tests.engines.no_torchvision import without_torchvision

without_torchvision()

from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.test.kits.attention_unittest.attention_methods import gdn_attention as kit

from sluice.integrations import sglang
from sluice.integrations.sglang import private
from sluice.testing.compare import assert_within, tolerance
from tests.engines.sglang_server import HV, Server, V, cat, part

CHUNK = 64  # where SGLang's prefix cache keeps states
TOLERANCE = 10 * tolerance(torch.float32, device="cpu")


@pytest.fixture
def server():
    made = Server(4)
    yield made
    made.close()


def test_the_hook_builds_the_plug_ins_backend_and_leaves_sglangs_in_place(server):
    assert type(server.backend).__name__ == "SluiceGDNAttnBackend"
    assert private.base().__name__ == "GDNAttnBackend"
    assert server.backend.sluice_pad == 0  # SGLang keeps slot 0 for padded rows


def test_the_command_line_takes_the_name():
    from sglang.srt.arg_groups import choices

    sglang.register()
    sglang.register()
    assert choices.LINEAR_ATTN_KERNEL_BACKEND_CHOICES.count("sluice") == 1


@pytest.mark.parametrize(
    ("home", "name"),
    [
        ("sglang.srt.server_args", "add_linear_attn_kernel_backend_choices"),
        ("sglang.srt.layers.attention.linear.utils", "LinearAttnBackends"),  # not in 0.5.17
        ("sglang.srt.runtime_context", "get_exec"),  # not in 0.5.12
    ],
)
def test_a_release_without_a_name_gives_one_line_and_offers_nothing(
    monkeypatch, caplog, home, name
):
    monkeypatch.delattr(importlib.import_module(home), name)
    monkeypatch.setattr(private, "offer", None)
    monkeypatch.setattr(private, "_said", set())
    with caplog.at_level("WARNING", logger="sglang.srt.plugins.sluice"):
        sglang.register()
        sglang.register()
    (line,) = caplog.messages
    assert line.startswith(f"sluice: not offered: this SGLang has no {home}.{name}")


def test_chunks_and_decode_continue_a_prompt(server):
    one, two = server.inputs(40), server.inputs(90)
    want = [server.alone(*x) for x in (one, two)]
    batch = server.batch(ForwardMode.EXTEND, [1, 2], [3, 5], [0, 0], [30, 70])
    got = server.run(batch, *cat(part(one, 0, 30), part(two, 0, 70)))
    assert got.shape == (1, 100, HV, V)
    assert_within(got[0], torch.cat([want[0][:30], want[1][:70]]), TOLERANCE, name="prompts")
    batch = server.batch(ForwardMode.EXTEND, [2, 1], [5, 3], [70, 30], [15, 1])
    got = server.run(batch, *cat(part(two, 70, 85), part(one, 30, 31)))
    assert_within(got[0], torch.cat([want[1][70:85], want[0][30:31]]), TOLERANCE, name="chunks")
    # request 0 is SGLang's padding: its slot is 0
    batch = server.batch(ForwardMode.DECODE, [1, 2, 0], [3, 5, 0], [31, 85, 0], [1, 1, 1])
    got = server.run(batch, *cat(part(one, 31, 32), part(two, 85, 86), server.inputs(1)))
    assert got.shape == (1, 3, HV, V)
    assert_within(got[0, :2], torch.cat([want[0][31:32], want[1][85:86]]), TOLERANCE, name="decode")
    assert not got[0, 2].any()
    untouched = [i for i in range(server.cache().temporal.shape[0]) if i not in (3, 5)]
    assert server.cache().temporal[untouched].isnan().all()
    assert server.cache().conv[0][untouched].isnan().all()


def test_a_decode_step_takes_the_pair_of_projections(server):
    x = server.inputs(21)
    want = server.alone(*x)
    server.run(server.batch(ForwardMode.EXTEND, [1], [2], [0], [20]), *part(x, 0, 20))
    qkv, a, b = part(x, 20, 21)
    z = server.draw(1, HV * V)
    batch = server.batch(ForwardMode.DECODE, [1], [2], [20], [1])
    pair = (torch.cat([qkv, z], dim=1), torch.cat([b, a], dim=1))
    got, gate = server.run(batch, pair, None, None)
    assert_within(got[0], want[20:], TOLERANCE, name="decode")
    assert torch.equal(gate, z.view(1, HV, V))


def test_the_prefix_cache_gets_the_state_of_a_prompt_cut_there(server):
    """Reliability row 35. Of two prompts one is tracked: 100 tokens, kept after 64 of them."""
    one, two = server.inputs(100), server.inputs(30)
    batch = server.batch(ForwardMode.EXTEND, [1, 2], [3, 5], [0, 0], [100, 30])
    batch.mamba_track_mask = torch.tensor([True, False])
    batch.mamba_track_indices = torch.tensor([7, 0], dtype=torch.int64)
    batch.mamba_track_seqlens = torch.tensor([100, -1], dtype=torch.int32)
    server.run(batch, *cat(one, two))
    kept = server.cache().temporal[7].clone(), server.cache().conv[0][7].clone()
    server.run(server.batch(ForwardMode.EXTEND, [1], [3], [0], [CHUNK]), *part(one, 0, CHUNK))
    assert_within(kept[0], server.cache().temporal[3], TOLERANCE, name="state")
    assert torch.equal(kept[1], server.cache().conv[0][3])


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        pytest.param(case, layout, id=f"{case.name}-{layout}")
        for case in kit.make_gdn_cases("torch_native")
        for layout in ("shuffled_pages", "interleaved_pages", "non_monotonic_extend")
        if layout != "non_monotonic_extend" or not case.forward_mode.is_decode()
    ],
)
def test_sglangs_own_cases(case, layout, monkeypatch):
    """Its recurrence in plain torch is the judge. They are for a GPU, whose dice are left alone.

    The layouts are those that SGLang's own tests try.
    """
    from sluice.integrations.sglang.backend import SluiceGDNAttnBackend

    monkeypatch.setattr(kit, "GDNAttnBackend", SluiceGDNAttnBackend)
    monkeypatch.setattr(private.base(), "forward_extend", None)
    monkeypatch.setattr(private.base(), "forward_decode", None)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: None)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: None)
    monkeypatch.setattr(private, "asked", lambda name: (True, True, True))
    kit.run_gdn_attention_case(unittest.TestCase(), case, device="cpu", loc_layout=layout)


def test_what_is_not_served_goes_to_sglangs_own_method(server, monkeypatch):
    asked = []
    monkeypatch.setattr(
        private.base(), "forward_extend", lambda self, *args, **kwargs: asked.append(args)
    )
    x = server.inputs(8)
    batch = server.batch(ForwardMode.EXTEND, [1], [2], [0], [8])
    server.backend.init_forward_metadata(batch)
    batch.forward_mode = ForwardMode.TARGET_VERIFY
    server.backend.forward_extend(server.layer, batch, *x)
    server.backend.mis_metadata = SimpleNamespace()
    batch.forward_mode = ForwardMode.EXTEND
    server.backend.forward_extend(server.layer, batch, *x)
    assert len(asked) == 2
