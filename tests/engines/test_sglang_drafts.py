"""Draft tokens in SGLang's own backend class, pools, metadata and commit, on a CPU.

SGLang's kernels for draft tokens need a GPU, so the judge is the float64 oracle over each sequence
alone; and once SGLang's kernels in Triton's interpreter.
"""
# ruff: noqa: E402

from __future__ import annotations

import dataclasses
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tests.engines.no_torchvision import without_torchvision

without_torchvision()

from sglang.srt.layers.attention import hybrid_linear_attn_backend as hybrid
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative import spec_utils

from sluice.contract.errors import SluiceError
from sluice.integrations.sglang import private
from sluice.testing.compare import assert_same_bits, assert_within, tolerance
from tests.engines.sglang_server import Drafts, Server, cat, part

SCATTER = "scatter_mamba_states_after_mtp_verify"
T = 4
SLOTS = {0: 0, 1: 3, 2: 5, 3: 1}
"""Of each request; the first one is SGLang's padding."""


@pytest.fixture
def start(monkeypatch):
    """Start a server; each test finds SGLang's commit as SGLang has it, and nothing logged."""
    monkeypatch.setattr(hybrid, SCATTER, getattr(hybrid, SCATTER))
    monkeypatch.setattr(private, "_said", set())
    servers = []

    def made(**options) -> Server:
        given = {"layers": (0, 2, 5), "drafts": Drafts(T), "W": 4} | options
        servers.append(Server(4, **given))
        return servers[-1]

    yield made
    for server in servers:
        server.close()


class Story:
    """What happens to a server's requests, step by step; every step is judged by the oracle."""

    def __init__(self, server: Server) -> None:
        self.server = server
        none = [server.inputs(0) for _ in server.layers]
        self.told = {request: list(none) for request in SLOTS}  # one history for each layer
        self.limit = 10 * tolerance(server.dtype, server.drafts.state_dtype)

    def length(self, request: int) -> int:
        return len(self.told[request][0][0])

    def forward(self, mode: ForwardMode, new: dict[int, int]) -> dict[int, list]:
        """``new`` tokens of each request through all layers: what came in, for each layer."""
        server, before = self.server, [self.length(request) for request in new]
        batch = server.batch(mode, list(new), [SLOTS[r] for r in new], before, list(new.values()))
        server.backend.init_forward_metadata(batch)
        return self.layers(batch, new)

    def layers(self, batch, new: dict[int, int]) -> dict[int, list]:
        came: dict[int, list] = {request: [] for request in new}
        for i, layer in enumerate(self.server.layers):
            fresh = {request: self.server.inputs(n) for request, n in new.items()}
            got = self.server.forward(batch, *cat(*fresh.values()), layer)
            outputs = dict(zip(new, got[0].split(list(new.values())), strict=True))
            for request, x in fresh.items():
                came[request].append(x)
                if request == 0:
                    assert not outputs[request].any(), "padding"
                    continue
                want = self.server.exact(*cat(self.told[request][i], x), layer)[0]
                name = f"outputs of request {request} in layer {i}"
                assert_within(outputs[request].double(), want[-len(x[0]) :], self.limit, name=name)
        return came

    def tell(self, mode: ForwardMode, **new: int) -> None:
        """A step without drafts."""
        tokens = {int(name[1:]): n for name, n in new.items()}
        for request, came in self.forward(mode, tokens).items():
            self.keep(request, came)
        self.judge()

    def keep(self, request: int, came: list, n: int | None = None) -> None:
        self.told[request] = [
            cat(told, part(x, 0, len(x[0]) if n is None else n))
            for told, x in zip(self.told[request], came, strict=True)
        ]

    def verify(self, requests: list[int], tokens: int = T) -> dict[int, list]:
        """Draft tokens. Not a byte of the pools changes."""
        before = self.pools()
        came = self.forward(ForwardMode.TARGET_VERIFY, dict.fromkeys(requests, tokens))
        for name, a, b in zip(("windows", "states"), before, self.pools(), strict=True):
            assert_same_bits(a, b, name)
        return came

    def accept(self, came: dict[int, list], accepted: dict[int, int], **kept: Tensor) -> None:
        """SGLang's commit of the first tokens of each request, in the order of the batch."""
        self.server.commit(torch.tensor([n - 1 for n in accepted.values()]), **kept)
        for request, n in accepted.items():
            self.keep(request, came[request], n)
        self.judge()

    def pools(self) -> tuple[Tensor, Tensor]:
        cache = self.server.runner.req_to_token_pool.mamba_pool.mamba_cache
        return cache.conv[0].clone(), cache.temporal.clone()

    def judge(self, others: tuple[int, ...] = ()) -> None:
        """Every request's window and state; all other slots, except ``others``, are untouched."""
        for request, slot in SLOTS.items():
            if self.length(request):
                self.judge_slot(slot, self.told[request])
        told = {slot for request, slot in SLOTS.items() if self.length(request)}
        windows, states = self.pools()
        rest = [i for i in range(states.shape[1]) if i not in told | self.found | set(others)]
        assert windows[:, rest].isnan().all()
        assert states[:, rest].isnan().all()

    found: frozenset[int] = frozenset()
    """Slots of the prefix cache."""

    def judge_slot(self, slot: int, told: list) -> None:
        for layer, x in zip(self.server.layers, told, strict=True):
            _, window, state = self.server.exact(*x, layer)
            cache = self.server.cache(layer)
            assert_same_bits(cache.conv[0][slot], window.to(self.server.dtype), "window")
            assert_within(cache.temporal[slot].double(), state, self.limit, name="state")


KINDS = [
    pytest.param(torch.float32, torch.float32, id="float32"),
    pytest.param(torch.bfloat16, torch.float32, id="bfloat16"),
    pytest.param(torch.bfloat16, torch.bfloat16, id="bfloat16-states"),
]


def test_sglangs_own_kernels_leave_the_same_windows_and_states(monkeypatch):
    """In a process of its own, whose Triton interprets kernels."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    command = [sys.executable, "-m", "tests.engines.sglang_own_kernels"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("dtype", "state_dtype"), KINDS)
def test_steps_with_rejected_drafts_equal_each_sequence_alone(start, dtype, state_dtype):
    """Reliability rows 4 and 34."""
    story = Story(start(dtype=dtype, drafts=Drafts(T, state_dtype)))
    story.tell(ForwardMode.EXTEND, r1=5, r2=9)
    story.accept(story.verify([1, 2]), {1: 2, 2: 4})
    story.tell(ForwardMode.DECODE, r1=1, r2=1)
    story.tell(ForwardMode.EXTEND, r3=3, r1=2)
    story.accept(story.verify([3, 1, 2, 0]), {3: 1, 1: 4, 2: 3})  # the last row is padding
    story.accept(story.verify([2, 3]), {2: 1, 3: 2})
    story.tell(ForwardMode.DECODE, r2=1, r1=1, r3=1)
    story.accept(story.verify([1, 2, 3], tokens=3), {1: 3, 2: 1, 3: 2})  # fewer, as SGLang may


def test_pools_of_all_layers_interleaved(start):
    story = Story(start(drafts=Drafts(T, envelope=True)))
    assert not story.server.cache().temporal.is_contiguous()
    story.tell(ForwardMode.EXTEND, r1=5, r2=9)
    story.accept(story.verify([1, 2]), {1: 2, 2: 4})
    story.accept(story.verify([2, 1]), {2: 1, 1: 3})


def test_the_prefix_cache_gets_the_state_after_a_token_among_the_accepted(start):
    """Reliability row 35. Of two requests one is tracked: after 2 of 3 tokens, in slot 7."""
    story = Story(start())
    story.tell(ForwardMode.EXTEND, r1=5, r2=9)
    came = story.verify([1, 2])
    prefix = [cat(told, part(x, 0, 2)) for told, x in zip(story.told[1], came[1], strict=True)]
    kept, kept_steps = torch.tensor([7, 6]), torch.tensor([1, -1])
    story.found = frozenset({7})
    story.accept(came, {1: 3, 2: 4}, kept=kept, kept_steps=kept_steps)
    story.judge_slot(7, prefix)
    story.accept(story.verify([1, 2]), {1: 1, 2: 1}, kept=kept, kept_steps=torch.tensor([-1, -1]))
    story.judge_slot(7, prefix)


def test_sglangs_whole_commit_of_accepted_tokens(start, monkeypatch):
    """From accepted tokens to states: SGLang finds the steps, also of the prefix it keeps."""
    story = Story(start())
    story.tell(ForwardMode.EXTEND, r1=6, r2=9)
    came = story.verify([1, 2])
    full = SimpleNamespace(
        token_to_kv_pool=None, req_to_token_pool=None, kv_index_translator=None,
        needs_cpu_seq_lens=False,
    )  # fmt: skip
    server = story.server
    server.runner.attn_backend = hybrid.HybridLinearAttnBackend(full, server.backend, [])
    server.runner.model = None
    monkeypatch.setattr(spec_utils, "mambaish_config", lambda config: object())
    monkeypatch.setattr(spec_utils, "mamba_track_grid", lambda page: 4)
    batch = SimpleNamespace(
        req_pool_indices=torch.tensor([1, 2]),
        seq_lens=torch.tensor([6, 9]),
        mamba_track_indices=torch.tensor([7, 6]),
        forward_mode=ForwardMode.TARGET_VERIFY,
        tree_cache=SimpleNamespace(page_size=1),
    )
    spec_utils.commit_mamba_states_after_verify(
        SimpleNamespace(model_runner=server.runner),
        batch,
        accept_lens=torch.tensor([3, 1]),
        accept_index=torch.tensor([[0, 1, 2, -1], [4, -1, -1, -1]]),
        draft_token_num=T,
    )
    prefix = [cat(told, part(x, 0, 2)) for told, x in zip(story.told[1], came[1], strict=True)]
    story.keep(1, came[1], 3)
    story.keep(2, came[2], 1)
    story.found = frozenset({7})  # 6 + 3 tokens pass 8; 9 + 1 pass no multiple of 4
    story.judge()
    story.judge_slot(7, prefix)


def test_a_batch_is_committed_after_another_was_verified(start, monkeypatch):
    """As SGLang does with pipeline stages: the requests say which batch is meant."""
    story = Story(start())
    story.tell(ForwardMode.EXTEND, r1=5, r2=9, r3=2)
    monkeypatch.setattr(hybrid, "pp_spec_stable_rows_enabled", lambda: True)
    came = story.verify([1, 3])
    then = story.verify([2])
    story.accept(came, {1: 2, 3: 4}, requests=torch.tensor([1, 3]))
    story.accept(then, {2: 3}, requests=torch.tensor([2]))


def test_the_metadata_of_a_captured_graph(start):
    """A graph of four rows, captured with dummy requests and replayed with two, others padded."""
    story = Story(start())
    story.tell(ForwardMode.EXTEND, r1=5, r2=9)
    server, before = story.server, story.pools()
    server.backend.init_cuda_graph_state(4, 4 * T)
    made = server.batch(ForwardMode.TARGET_VERIFY, [0] * 4, [0] * 4, [0] * 4, [T] * 4)
    server.backend.init_forward_metadata_out_graph(made, in_capture=True)
    for layer in server.layers:
        assert not server.forward(made, *server.inputs(4 * T), layer).any()
    for a, b in zip(before, story.pools(), strict=True):
        assert_same_bits(a, b, "pools")
    replayed = server.batch(
        ForwardMode.TARGET_VERIFY, [2, 1, 0, 0], [5, 3, 0, 0], [9, 5, 0, 0], [T] * 4
    )
    replayed.num_padding = 2
    server.backend.init_forward_metadata_out_graph(replayed)
    slots = server.backend.forward_metadata.mamba_cache_indices
    assert slots.tolist() == [5, 3, -1, -1]
    came: dict[int, list] = {1: [], 2: []}
    for i, layer in enumerate(server.layers):
        fresh = {2: server.inputs(T), 1: server.inputs(T), 0: server.inputs(2 * T)}
        got = server.forward(replayed, *cat(*fresh.values()), layer)
        assert not got[0, 2 * T :].any()
        for request, row in ((2, got[0, :T]), (1, got[0, T : 2 * T])):
            want = server.exact(*cat(story.told[request][i], fresh[request]), layer)[0]
            assert_within(row.double(), want[-T:], story.limit, name="outputs")
            came[request].append(fresh[request])
    story.accept(came, {2: 3, 1: 1})


def test_inputs_may_be_a_part_of_a_projection(start):
    story = Story(start())
    story.tell(ForwardMode.EXTEND, r1=5)
    server, layer = story.server, story.server.layer
    batch = server.batch(ForwardMode.TARGET_VERIFY, [1], [3], [5], [T])
    server.backend.init_forward_metadata(batch)
    x, a, b = server.inputs(T)
    whole, ba = torch.cat([x, x], dim=1), torch.cat([b, a], dim=1)
    b_part, a_part = ba.chunk(2, dim=1)
    got = server.forward(batch, whole[:, : x.shape[1]], a_part, b_part, layer)
    want = server.exact(*cat(story.told[1][0], (x, a, b)), layer)[0]
    assert_within(got[0].double(), want[-T:], story.limit, name="outputs")
    for other in server.layers[1:]:
        server.forward(batch, x, a, b, other)
    story.accept({1: [(x, a, b)] * 3}, {1: 4})


def test_the_log_says_that_drafts_are_served(start, caplog, monkeypatch):
    from sluice.integrations.sglang import backend

    monkeypatch.setattr(backend, "_compiled", set())
    with caplog.at_level("INFO", logger="sglang.srt.plugins.sluice"):
        Story(start()).tell(ForwardMode.EXTEND, r1=5)
    (line,) = caplog.messages
    assert line.startswith("sluice: serves decode, extend and draft tokens of gated delta layers: ")
    assert "verify cpu" in line
    assert "commit_layers cpu" in line


def test_what_the_prefill_flag_alone_serves(start, monkeypatch):
    """Draft tokens follow decode, as in SGLang."""
    server = start(linear_attn_decode_backend="triton")
    assert asked(server, monkeypatch) == []


def no_states(server: Server) -> None:
    pool = server.runner.req_to_token_pool.mamba_pool
    pool.mamba_cache = dataclasses.replace(pool.mamba_cache, intermediate_ssm=None)


def rings(server: Server) -> None:
    pool = server.runner.req_to_token_pool.mamba_pool
    pool.mamba_cache = dataclasses.replace(
        pool.mamba_cache, replayssm_d=pool.mamba_cache.temporal.clone()
    )


def trees(server: Server) -> None:
    server.backend.topk = 2


def no_topk(server: Server) -> None:
    del server.backend.topk


def unified(server: Server) -> None:
    server.backend.enable_unified_memory = True


def other_order(server: Server) -> None:
    pool = server.runner.req_to_token_pool.mamba_pool
    state = pool.mamba_cache.temporal.transpose(-1, -2).contiguous().transpose(-1, -2)
    pool.mamba_cache = dataclasses.replace(pool.mamba_cache, temporal=state)


def two_windows(server: Server) -> None:
    pool = server.runner.req_to_token_pool.mamba_pool
    pool.mamba_cache = dataclasses.replace(pool.mamba_cache, conv=2 * pool.mamba_cache.conv)


def asked(server: Server, monkeypatch, tokens: int = T) -> list[str]:
    """What the log says of two layers and a commit, all of which go to SGLang's own functions."""
    own, lines = [], []
    monkeypatch.setattr(
        private.base(), "forward_extend", lambda self, *args, **kwargs: own.append("forward")
    )
    monkeypatch.setattr(hybrid, SCATTER, lambda *args, **kwargs: own.append("commit"))
    monkeypatch.setattr(private._log, "log", lambda level, text, *rest: lines.append(text % rest))
    batch = server.batch(ForwardMode.TARGET_VERIFY, [1], [3], [5], [tokens])
    server.backend.forward_metadata = SimpleNamespace(mamba_cache_indices=torch.tensor([3]))
    for layer in server.layers[:2]:
        server.forward(batch, *server.inputs(tokens), layer)
    server.commit(torch.tensor([1]))
    assert own == ["forward", "forward", "commit"]
    return lines


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (no_states, "ReplaySSM"),
        (rings, "ReplaySSM"),
        (trees, "trees of drafts"),
        (no_topk, "trees of drafts"),  # as far as anybody can tell
        (unified, "unified memory"),
        (other_order, "recurrent states that are not contiguous"),
        (two_windows, "pools of another layout"),
    ],
)
def test_another_form_goes_to_sglang_with_one_line(start, monkeypatch, change, reason):
    server = start()
    change(server)
    assert asked(server, monkeypatch) == [
        f"sluice: SGLang's own kernels serve draft tokens with {reason}"
    ]


@pytest.mark.parametrize(
    ("drafts", "reason"),
    [(Drafts(9), "more than 8 tokens of a request"), (Drafts(T, slots=60), "many more slots")],
)
def test_other_sizes_go_to_sglang_with_one_line(start, monkeypatch, drafts, reason):
    (line,) = asked(start(drafts=drafts), monkeypatch, drafts.T)
    assert line.startswith(f"sluice: SGLang's own kernels serve draft tokens with {reason}")


def test_drafts_of_different_lengths_go_to_sglang_with_one_line(start, monkeypatch):
    monkeypatch.setenv("SGLANG_RAGGED_VERIFY_MODE", "compact")
    (line,) = asked(start(), monkeypatch)
    assert line.endswith("draft tokens with drafts of different lengths")


def test_a_commit_that_is_not_known_goes_to_sglang_with_one_line(start, monkeypatch):
    (line,) = asked(start(), monkeypatch)  # in place of SGLang's is one of other arguments
    assert line.endswith(f"draft tokens with other arguments of {SCATTER}")
    monkeypatch.undo()

    def update(self, steps, kept, kept_steps, model, req_pool_indices=None):
        raise AssertionError

    monkeypatch.setattr(
        hybrid.HybridLinearAttnBackend, "update_mamba_state_after_mtp_verify", update
    )
    assert private.commit_with(print) == f"a commit without {SCATTER}"
    monkeypatch.delattr(hybrid, SCATTER)
    assert "that this SGLang does not have" in private.commit_with(print)


def test_the_verify_flag_leaves_drafts_with_sglang(start, monkeypatch):
    server = start(linear_attn_verify_backend="triton")
    assert asked(server, monkeypatch) == []


def test_drafts_of_different_lengths_that_come_nevertheless_raise(start):
    story = Story(start())
    server = story.server
    story.tell(ForwardMode.EXTEND, r1=5)
    batch = server.batch(ForwardMode.TARGET_VERIFY, [1], [3], [5], [T])
    server.backend.init_forward_metadata(batch)
    batch.spec_info.ragged_verify_layout = object()
    with pytest.raises(SluiceError, match="linear-attn-verify-backend triton"):
        server.forward(batch, *server.inputs(T), server.layer)


def test_pools_of_other_models_are_committed_by_sglang(start, monkeypatch):
    """Also once sluice commits some: only pools that have its drafts are its own."""
    seen = []

    def own(
        mamba_caches, state_indices_tensor, last_correct_step_indices, mamba_track_indices,
        mamba_steps_to_track, src_indices_raw=None,
    ):  # fmt: skip
        seen.append((mamba_caches, src_indices_raw))

    monkeypatch.setattr(hybrid, SCATTER, own)
    story = Story(start())
    story.tell(ForwardMode.EXTEND, r1=5)
    story.accept(story.verify([1]), {1: 2})
    assert seen == []
    other = SimpleNamespace(intermediate_ssm=torch.zeros(1))
    getattr(hybrid, SCATTER)(other, None, None, None, None, src_indices_raw="rows")
    assert seen == [(other, "rows")]
