"""Sequences scheduled by hand; their batches as vLLM's own builder of metadata describes them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from vllm.config import CUDAGraphMode
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder
from vllm.v1.kv_cache_interface import MambaSpec

from tests.engines.vllm_engine import NGRAM


class Row(NamedTuple):
    """A sequence's part of a batch: tokens, of which the last may be wrong drafts."""

    name: str
    tokens: int
    wrong: int = 0
    drafts: int = -1  # how many of them vLLM calls drafts; -1 in a prompt


def engine_config(folder: str, drafts: int, **options: Any) -> Any:
    """vLLM's configuration of a model in a folder, with graphs for decode."""
    more = {"speculative_config": {**NGRAM, "num_speculative_tokens": drafts}} if drafts else {}
    given = {"dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 256}
    config = EngineArgs(model=folder, **given | more | options).create_engine_config()
    config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
    config.compilation_config.max_cudagraph_capture_size = 64
    return config


class Batches:
    """A sequence has a slot and one for each draft; ``done`` tokens are in its state."""

    def __init__(self, config: Any, drafts: int) -> None:
        spec = MambaSpec(
            block_size=256,
            shapes=((1,),),
            dtypes=(torch.float32,),
            num_speculative_blocks=drafts,
        )
        self.builder = GDNAttentionMetadataBuilder(spec, ["layer"], config, torch.device("cpu"))
        self.drafts = drafts
        self.slots: dict[str, list[int]] = {}
        self.done: dict[str, int] = {}
        self.accepted: dict[str, int] = {}

    def begin(self, name: str) -> None:
        """Slots of a new sequence."""
        used = 1 + len(self.slots) * (self.drafts + 1)
        self.slots[name] = [used + i for i in range(self.drafts + 1)]
        self.done[name], self.accepted[name] = 0, 1

    def end(self, row: Row) -> None:
        """What its right tokens were is known."""
        right = row.tokens - row.wrong
        self.done[row.name] += right
        self.accepted[row.name] = right if row.drafts >= 0 else 1

    def metadata(self, rows: list[Row], padded_rows: int = 0, padded_tokens: int = 0) -> Any:
        """vLLM's, of a batch of these rows."""
        n = len(rows) + padded_rows
        lengths = [row.tokens for row in rows] + [0] * padded_rows
        borders = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        ends = [self.done[row.name] + row.tokens for row in rows] + [0] * padded_rows
        table = torch.zeros(n, 8, dtype=torch.int32)
        for i, row in enumerate(rows):
            table[i, : self.drafts + 1] = torch.tensor(self.slots[row.name])
        common = CommonAttentionMetadata(
            query_start_loc=borders,
            query_start_loc_cpu=borders,
            seq_lens=torch.tensor(ends, dtype=torch.int32),
            seq_lens_cpu_upper_bound=torch.tensor(ends, dtype=torch.int32),
            max_seq_len=max(ends),
            num_reqs=n,
            num_actual_tokens=sum(lengths) + padded_tokens,
            max_query_len=max(lengths),
            block_table_tensor=table,
            slot_mapping=torch.zeros(sum(lengths), dtype=torch.int64),
            is_prefilling=torch.tensor([row.drafts < 0 for row in rows] + [False] * padded_rows),
        )
        if not self.drafts:
            return self.builder.build(0, common)
        drafts = [row.drafts for row in rows] + [-1] * padded_rows
        accepted = [self.accepted[row.name] for row in rows] + [1] * padded_rows
        return self.builder.build(
            0,
            common,
            num_accepted_tokens=torch.tensor(accepted, dtype=torch.int32),
            num_decode_draft_tokens_cpu=torch.tensor(drafts, dtype=torch.int32),
        )
