"""Batches as vLLM's own builder of metadata describes them, with graphs' buffers and padding.

A graph is captured on a GPU only. What it would read, the builder also writes on a CPU: buffers of
a fixed size, with rows and tokens that fill a batch up. The judge is each sequence alone.
"""

from __future__ import annotations

import pytest
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from sluice.integrations.vllm import private
from sluice.integrations.vllm.switch import MAX_DRAFTS
from sluice.testing.compare import assert_within
from tests.engines.vllm_batches import Batches, Row, engine_config
from tests.integrations.vllm_layer import PAGES, TOLERANCE, Engine, cat, part


class Server(Batches):
    """Sequences of one layer; pages that were never written hold NaN."""

    def __init__(self, folder: str, drafts: int) -> None:
        super().__init__(engine_config(folder, drafts), drafts)
        self.layer = Engine(drafts=drafts)
        self.inputs, self.wanted = {}, {}

    def add(self, name: str, length: int) -> None:
        self.begin(name)
        self.inputs[name] = self.layer.inputs(length)
        self.wanted[name] = self.layer.alone(*self.inputs[name])

    def step(self, rows: list[Row], padded_rows: int = 0, padded_tokens: int = 0):
        """Run a batch and compare what is right of it. Returns vLLM's metadata."""
        metadata = self.metadata(rows, padded_rows, padded_tokens)
        assert private.unknown_fields(metadata) == []
        parts = []
        for row in rows:
            at = self.done[row.name]
            right = row.tokens - row.wrong
            parts += [part(self.inputs[row.name], at, at + right), self.layer.inputs(row.wrong)]
        found = self.layer.run(metadata, *cat(*parts, self.layer.inputs(padded_tokens)))
        begin = 0
        for row in rows:
            at, right = self.done[row.name], row.tokens - row.wrong
            expected = self.wanted[row.name][at : at + right]
            assert_within(found[begin : begin + right], expected, TOLERANCE, name=row.name)
            begin += row.tokens
            self.end(row)
        assert not found[begin:].any()
        used = {slot for slots in self.slots.values() for slot in slots}
        assert self.layer.page[[i for i in range(PAGES) if i not in used]].isnan().all()
        return metadata


def test_prompts_decode_and_a_graph_with_room(truth):
    server = Server(truth.folder, drafts=0)
    for name, length in (("a", 40), ("one token", 9), ("chunks", 70), ("late", 6)):
        server.add(name, length)
    found = server.step([Row("a", 17), Row("one token", 1), Row("chunks", 30)])
    assert (found.num_prefills, found.num_decodes) == (3, 0)
    found = server.step([Row("a", 1, 0, 0), Row("chunks", 31), Row("late", 1)])
    assert (found.num_prefills, found.num_decodes) == (2, 1)
    # the last token of a prompt alone, beside others: it has a state, so it is like a decode step
    found = server.step(
        [Row("a", 1, 0, 0), Row("one token", 1, 0, 0), Row("chunks", 1), Row("late", 1, 0, 0)]
    )
    assert (found.num_prefills, found.num_decodes) == (0, 4)
    alive = [Row(name, 1, 0, 0) for name in ("late", "a", "chunks")]
    found = server.step(alive, padded_rows=5, padded_tokens=5)
    buffer = server.builder.non_spec_state_indices_tensor
    assert found.non_spec_state_indices_tensor.data_ptr() == buffer.data_ptr()
    assert found.num_actual_tokens == 8


def test_drafts_beside_prompts_and_a_graph_with_room(truth):
    server = Server(truth.folder, drafts=MAX_DRAFTS)
    for name, length in (("a", 60), ("one token", 40), ("chunks", 60)):
        server.add(name, length)
    server.step([Row("a", 11), Row("one token", 1)])
    # two rows with drafts, of which some are wrong, and the first chunk of a prompt between them
    found = server.step([Row("a", 4, 2, 3), Row("chunks", 5), Row("one token", 3, 0, 2)])
    assert (found.num_prefills, found.num_spec_decodes) == (1, 2)
    # one token of the prompt: vLLM calls it a prompt here
    found = server.step([Row("a", 2, 1, 1), Row("one token", 4, 3, 3), Row("chunks", 1)])
    assert (found.num_prefills, found.num_spec_decodes) == (1, 2)
    server.step([Row("chunks", 20)])  # no drafts at all
    alive = ("one token", "a", "chunks")
    for wrong, tokens in (((0, 3, 1), 4), ((3, 0, 2), MAX_DRAFTS + 1), ((0, 1, 1), 2)):
        rows = [Row(name, tokens, bad, tokens - 1) for name, bad in zip(alive, wrong, strict=True)]
        found = server.step(rows, padded_rows=2, padded_tokens=2 * tokens)
        buffer = server.builder.spec_state_indices_tensor
        assert found.spec_state_indices_tensor.data_ptr() == buffer.data_ptr()
    # nothing was drafted: vLLM still says how many tokens of the step before were kept
    found = server.step([Row(name, 1, 0, 0) for name in alive], padded_rows=1, padded_tokens=1)
    assert found.num_spec_decodes == 3
    server.step([Row(name, 4, 1, 3) for name in reversed(alive)])


@pytest.mark.parametrize("drafts", [0, MAX_DRAFTS])
def test_the_batch_that_is_captured_touches_no_page(truth, drafts):
    """Its rows have tokens, and slot 0."""
    server, n, T = Server(truth.folder, drafts), 6, drafts + 1
    borders = T * torch.arange(n + 1, dtype=torch.int32)
    lengths = torch.full((n,), T, dtype=torch.int32)
    metadata = server.builder.build_for_cudagraph_capture(
        CommonAttentionMetadata(
            query_start_loc=borders,
            query_start_loc_cpu=borders,
            seq_lens=lengths,
            seq_lens_cpu_upper_bound=lengths,
            max_seq_len=256,
            num_reqs=n,
            num_actual_tokens=n * T,
            max_query_len=T,
            block_table_tensor=torch.zeros(n, 8, dtype=torch.int32),
            slot_mapping=torch.zeros(n * T, dtype=torch.int64),
        )
    )
    assert not server.layer.run(metadata, *server.layer.inputs(n * T)).any()
    assert server.layer.page.isnan().all()
