"""SGLang's own backend class, pools and metadata, with the plug-in's kernels, on a CPU.

SGLang's kernels need a GPU, so the judge is the layer over each sequence alone. A whole server was
not tried.
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

from sglang.srt.layers.attention.linear.utils import resolve_linear_attn_backends
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.runtime_context import get_exec
from sglang.test.kits.attention_unittest.attention_methods import gdn_attention as kit

from sluice import ops
from sluice.integrations import sglang
from sluice.integrations.sglang import private
from sluice.testing.compare import assert_within, tolerance

HK, HV, K, V, W = 2, 4, 16, 8, 2  # the kit's pools are for convolutions of width 2
D = 2 * HK * K + HV * V
CHUNK = 64  # where SGLang's prefix cache keeps states
TOLERANCE = 10 * tolerance(torch.float32, device="cpu")


class Server:
    """A runner of SGLang's with real pools, and the plug-in's backend as the hook builds it."""

    def __init__(self, requests: int) -> None:
        self.random = torch.Generator().manual_seed(0)
        case = kit.GDNAttentionCase(
            name="sluice",
            backend="torch_native",
            forward_mode=ForwardMode.EXTEND,
            num_k_heads=HK,
            num_v_heads=HV,
            page_size=1,
            prefix_lens=(0,) * requests,
            extend_lens=(1,) * requests,
        )
        self.runner = kit.MockGDNModelRunner(
            case=case,
            model_config=kit.TinyGDNModelConfig(num_heads=HK, head_dim=K, context_len=256),
            dtype=torch.float32,
            device="cpu",
            max_context_len=256,
            head_dim=K,
            head_k_dim=K,
            head_v_dim=V,
            runner_batch_size=2 * requests,
        )
        self.flags = get_exec().mamba.override(
            linear_attn_decode_backend="sluice", linear_attn_prefill_backend="sluice"
        )
        self.flags.__enter__()
        self.runner.linear_attn_backends = resolve_linear_attn_backends()
        self.backend = sglang._around(lambda runner, full: _build(runner), self.runner, None)
        self.layer = kit.RadixLinearAttention(
            layer_id=0,
            num_q_heads=HK,
            num_k_heads=HK,
            num_v_heads=HV,
            head_q_dim=K,
            head_k_dim=K,
            head_v_dim=V,
            conv_weights=self.draw(D, W) / 2,
            bias=None,
            activation="silu",
            A_log=self.draw(HV),
            dt_bias=self.draw(HV),
        )

    def draw(self, *size: int) -> torch.Tensor:
        return torch.randn(*size, generator=self.random)

    def inputs(self, n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.draw(n, D), self.draw(n, HV), self.draw(n, HV)

    def cache(self):
        return self.runner.req_to_token_pool.mamba2_layer_cache(0)

    def alone(self, x, a, b) -> torch.Tensor:
        w = self.layer
        q, k, v, g, beta = ops.conv_qkv(
            x[None], w.conv_weights, num_k_heads=HK, num_v_heads=HV, head_k_dim=K, head_v_dim=V,
            a=a[None], b=b[None], A_log=w.A_log, dt_bias=w.dt_bias,
        )  # fmt: skip
        return ops.prefill(q, k, v, g, beta)[0][0]

    def batch(self, mode: ForwardMode, requests: list[int], slots: list[int], before, new):
        """A forward batch of ``new`` tokens each, after ``before``."""
        pool = self.runner.req_to_token_pool
        rows = torch.tensor(requests, dtype=torch.int32)
        pool.req_index_to_mamba_index_mapping[rows] = torch.tensor(slots, dtype=torch.int32)
        lengths = [p + n for p, n in zip(before, new, strict=True)]
        made = ForwardBatch(
            forward_mode=mode,
            batch_size=len(requests),
            input_ids=torch.zeros(sum(new), dtype=torch.int64),
            req_pool_indices=rows,
            seq_lens=torch.tensor(lengths, dtype=torch.int32),
            seq_lens_cpu=torch.tensor(lengths, dtype=torch.int32),
            out_cache_loc=torch.zeros(sum(new), dtype=torch.int64),
            seq_lens_sum=sum(lengths),
            positions=torch.zeros(sum(new), dtype=torch.int64),
        )
        if mode.is_extend():
            made.extend_prefix_lens = torch.tensor(before, dtype=torch.int32)
            made.extend_prefix_lens_cpu = list(before)
            made.extend_seq_lens = torch.tensor(new, dtype=torch.int32)
            made.extend_seq_lens_cpu = list(new)
            starts = torch.tensor([0, *new[:-1]], dtype=torch.int32).cumsum(0)
            made.extend_start_loc = starts.to(torch.int32)
            made.extend_num_tokens = sum(new)
        return made

    def run(self, batch, x, a, b):
        self.backend.init_forward_metadata(batch)
        forward = (
            self.backend.forward_decode
            if batch.forward_mode.is_decode()
            else self.backend.forward_extend
        )
        return forward(self.layer, batch, x, a, b)


def _build(runner):
    from sglang.srt.layers.attention.linear import gdn_backend

    return gdn_backend.GDNAttnBackend(runner)


def _cat(*parts):
    return tuple(torch.cat(xs) for xs in zip(*parts, strict=True))


def _part(x, start, stop):
    return tuple(y[start:stop] for y in x)


@pytest.fixture
def server():
    made = Server(4)
    made.cache().conv[0].fill_(float("nan"))
    made.cache().temporal.fill_(float("nan"))
    yield made
    made.flags.__exit__(None, None, None)
    made.runner._server_args_override.restore()


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
    got = server.run(batch, *_cat(_part(one, 0, 30), _part(two, 0, 70)))
    assert got.shape == (1, 100, HV, V)
    assert_within(got[0], torch.cat([want[0][:30], want[1][:70]]), TOLERANCE, name="prompts")
    batch = server.batch(ForwardMode.EXTEND, [2, 1], [5, 3], [70, 30], [15, 1])
    got = server.run(batch, *_cat(_part(two, 70, 85), _part(one, 30, 31)))
    assert_within(got[0], torch.cat([want[1][70:85], want[0][30:31]]), TOLERANCE, name="chunks")
    # request 0 is SGLang's padding: its slot is 0
    batch = server.batch(ForwardMode.DECODE, [1, 2, 0], [3, 5, 0], [31, 85, 0], [1, 1, 1])
    got = server.run(batch, *_cat(_part(one, 31, 32), _part(two, 85, 86), server.inputs(1)))
    assert got.shape == (1, 3, HV, V)
    assert_within(got[0, :2], torch.cat([want[0][31:32], want[1][85:86]]), TOLERANCE, name="decode")
    assert not got[0, 2].any()
    untouched = [i for i in range(server.cache().temporal.shape[0]) if i not in (3, 5)]
    assert server.cache().temporal[untouched].isnan().all()
    assert server.cache().conv[0][untouched].isnan().all()


def test_a_decode_step_takes_the_pair_of_projections(server):
    x = server.inputs(21)
    want = server.alone(*x)
    server.run(server.batch(ForwardMode.EXTEND, [1], [2], [0], [20]), *_part(x, 0, 20))
    qkv, a, b = _part(x, 20, 21)
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
    server.run(batch, *_cat(one, two))
    kept = server.cache().temporal[7].clone(), server.cache().conv[0][7].clone()
    server.run(server.batch(ForwardMode.EXTEND, [1], [3], [0], [CHUNK]), *_part(one, 0, CHUNK))
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
    monkeypatch.setattr(private, "asked", lambda name: (True, True))
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
