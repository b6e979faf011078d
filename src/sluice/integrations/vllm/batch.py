"""One batch of vLLM, as the operators address it.

vLLM orders a batch: sequences with one token first (``decodes``), prompts after them, padding of a
captured graph last. Slot 0 is padding. Sequences with draft tokens are listed apart, and if both
kinds are there, index tensors say which token belongs to which.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from sluice.integrations.vllm.private import KEPT
from sluice.ops import Checkpoints

PAD = 0
"""vLLM's null block: rows of this slot are padding."""


class Rows(NamedTuple):
    """N sequences without drafts; ``decodes`` of them, the first ones, have one token each.

    slots [N]. With prompts: cu_seqlens [N + 1], has_state [N] and the borders of the prompts alone,
    counted from their first token. tokens: which tokens of the batch are theirs, None for all.
    """

    slots: Tensor
    decodes: int
    cu_seqlens: Tensor | None = None
    has_state: Tensor | None = None
    prompt_borders: Tensor | None = None
    checkpoints: Checkpoints | None = None
    tokens: Tensor | None = None


class Drafts(NamedTuple):
    """N sequences with up to T tokens each: one that is certain, then drafts.

    slots [N, T]: token t's state goes to ``slots[n, t]``. accepted [N]: how many tokens of the step
    before were kept, at least 1; the sequence continues from ``slots[n, accepted - 1]``.
    cu_seqlens [N + 1]. tokens: which tokens of the batch are theirs, None for all.
    """

    slots: Tensor
    accepted: Tensor
    cu_seqlens: Tensor
    tokens: Tensor | None = None


class Batch(NamedTuple):
    """``length`` tokens, of sequences with and without drafts."""

    length: int
    rows: Rows | None
    drafts: Drafts | None


def kept(metadata: Any) -> Batch | None:
    """What a layer before this one has read of the same metadata.

    Metadata that were copied and got other slots are read anew.
    """
    found = vars(metadata).get(KEPT)
    if found is None or any(a is not b for a, b in zip(found[0], _slots(metadata), strict=True)):
        return None
    made: Batch = found[1]
    return made


def read(metadata: Any) -> Batch:
    """The batch that vLLM's metadata describe, which is left there for the layers to come.

    Without prompts these are views alone: nothing of it becomes part of a captured graph.
    """
    made = _read(metadata)
    vars(metadata)[KEPT] = (_slots(metadata), made)
    return made


def _slots(m: Any) -> tuple[Tensor | None, Tensor | None]:
    return m.non_spec_state_indices_tensor, m.spec_state_indices_tensor


def _read(m: Any) -> Batch:
    if m.spec_sequence_masks is None:
        return Batch(m.num_actual_tokens, _rows(m, None), None)
    alone = m.num_prefills == 0 and m.num_decodes == 0
    N = m.num_spec_decodes
    drafts = Drafts(
        m.spec_state_indices_tensor[:N],
        m.num_accepted_tokens[:N],
        m.spec_query_start_loc[: N + 1],
        None if alone else m.spec_token_indx,
    )
    rows = None if alone else _rows(m, m.non_spec_token_indx)
    return Batch(m.num_actual_tokens, rows, drafts)


def _rows(m: Any, tokens: Tensor | None) -> Rows:
    slots, borders = m.non_spec_state_indices_tensor, m.non_spec_query_start_loc
    if m.num_prefills == 0:  # one token each, padded rows included
        N = m.num_actual_tokens if tokens is None else m.num_decodes
        return Rows(slots[:N], N, tokens=tokens)
    N, decodes = m.num_decodes + m.num_prefills, m.num_decodes
    if m.num_decode_tokens != decodes:
        decodes = 0  # the prefill kernel takes sequences of any length
    given = getattr(m, "prefill_query_start_loc", None)
    if decodes == 0:
        prompts = borders[: N + 1]
    elif given is not None and given.shape[0] >= N - decodes + 1:
        prompts = given[: N - decodes + 1]
    else:
        prompts = borders[decodes : N + 1] - decodes
    ck = getattr(m, "checkpoint", None)
    kept = None
    if ck is not None:
        kept = Checkpoints(ck.state_indices[:N, None], positions=ck.checkpoint_offsets[:N, None])
    slots = slots[:N].contiguous()  # vLLM's are a column of its table; kernels read dense ones
    return Rows(slots, decodes, borders[: N + 1], m.has_initial_state[:N], prompts, kept, tokens)
