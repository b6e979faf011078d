"""``Workload``: what ``sluice bench`` times, made of the same ``Case`` that tests run.

A workload is a model's shape, an operator and a size: the lengths of packed prompts, or a number of
sequences with one token each. ``describe`` makes the ``Case``, so a timed workload uses the same
generators, oracle and counts as a tested one, and a test runs a small version of each.

Sizes are written like this:

    8192            one prompt                      4x2048      four equal ones
    2048+2x512+1    a ragged mix                    N=64        64 sequences, one token each

The inputs are those that a layer passes. ``prefill`` follows ``conv_qkv``, so it gets unit keys and
finished gates; ``decode`` and ``verify`` get raw ones, and normalise keys and compute gates
themselves. A ``raw`` prefill does the same, for layers with another convolution.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from sluice.testing.case import Case

PROMPT_OPS = ("prefill", "causal_conv1d", "conv_qkv", "rms_norm_gated", "layer", "train")
BATCH_OPS = ("decode", "verify", "step", "causal_conv1d", "conv_qkv")
OPS = (
    "prefill",
    "decode",
    "verify",
    "causal_conv1d",
    "conv_qkv",
    "rms_norm_gated",
    "step",
    "layer",
    "train",
)
DRAFTS = 4  # draft tokens per sequence

NAMED = {
    "short": "512",
    "long": "8192",
    "longest": "32768",
    "many": "8x1024",
    "swarm": "64x128",
    "ragged": "4096+2048+1024+512+300+129+64+17+1+1",
    "continue": "2048+2x512+16x1",
}
"""Named sizes: a single prompt, many short ones, a ragged mix, and one step of an engine that cuts
prompts into chunks: a chunk of 2048, two of 512, and sixteen sequences that decode."""

ABOUT = {
    "prefill": "the recurrence over prompts, state in and out",
    "decode": "one token per sequence, gates and l2 norm inside, state updated in place",
    "verify": f"{DRAFTS} draft tokens per sequence, then commit of those accepted",
    "causal_conv1d": "depthwise convolution with its rolling window",
    "conv_qkv": "convolution, split, l2 norm and gates in one",
    "rms_norm_gated": "norm over each head, then the gate",
    "step": "a whole layer's decode: convolution, gates, recurrence, gated norm",
    "layer": "a whole layer over prompts, from the projections to the gated norm",
    "train": "forward and backward of prefill: gradients of q, k, v, g and beta",
}


@dataclass(frozen=True)
class Size:
    """Prompts of some lengths, or ``batch`` sequences of one token (``lengths`` is then None)."""

    lengths: tuple[int, ...] | None = None
    batch: int = 0

    @property
    def axis(self) -> str:
        """The axis of a plot: "batch", "length" (one prompt) or "mix"."""
        if self.lengths is None:
            return "batch"
        return "length" if len(self.lengths) == 1 else "mix"

    @property
    def tokens(self) -> int:
        return self.batch if self.lengths is None else sum(self.lengths)

    def __str__(self) -> str:
        if self.lengths is None:
            return f"N={self.batch}"
        runs = [(n, len(list(same))) for n, same in groupby(self.lengths)]
        return "+".join(f"{count}x{n}" if count > 1 else f"{n}" for n, count in runs)


def parse_size(text: str) -> Size:
    """A size from its notation or its name.

    >>> str(parse_size("2048+512+512+16x1")), parse_size("N=64").tokens, str(parse_size("many"))
    ('2048+2x512+16x1', 64, '8x1024')
    """
    text = NAMED.get(text.strip().lower(), text.strip())
    if found := re.fullmatch(r"[nN]=(\d+)", text):
        size = Size(batch=int(found[1]))
    else:
        lengths: list[int] = []
        for part in text.split("+"):
            found = re.fullmatch(r"(?:(\d+)x)?(\d+)", part.strip())
            if not found:
                known = ", ".join(NAMED)
                raise ValueError(
                    f"a length such as 8192, 4x2048, 2048+512 or {known}, got {text!r}"
                )
            lengths += [int(found[2])] * int(found[1] or 1)
        size = Size(lengths=tuple(lengths))
    if size.tokens < 1 or min(size.lengths or (1,)) < 1:
        raise ValueError(f"at least one token, got {text!r}")
    return size


@dataclass(frozen=True)
class Workload:
    """One case to time, with its names. ``heads`` are those of one rank."""

    case: Case
    op: str  # one of OPS; "layer" is a case of "step" with more tokens, "train" one of "prefill"
    model: str
    tp: int
    size: Size
    variant: str = ""  # "raw": prefill computes its gates and unit keys itself

    @property
    def name(self) -> str:
        return self.case.name

    @property
    def heads(self) -> tuple[int, int]:
        return self.case.Hk, self.case.Hv

    @property
    def bound(self) -> str:
        """The expected limit of the operator: "compute" or "memory"."""
        return "compute" if self.op in ("prefill", "layer", "train") else "memory"


def describe(
    op: str,
    shape: Any,
    size: Size,
    dtype: torch.dtype = torch.bfloat16,
    state_dtype: torch.dtype = torch.float32,
    raw: bool = False,
) -> Workload:
    """The workload of one operator for the layers of a model.

    ``shape`` has the attributes of a ``QwenShape``: head counts, widths, order of the projections.
    ``raw`` is for prefill: gates and l2 norm inside. Raises ``ValueError`` for a size that the
    operator does not take.
    """
    if op not in OPS:
        raise ValueError(f"op: expected one of {', '.join(OPS)}, got {op!r}")
    if size.lengths is None and op not in BATCH_OPS:
        raise ValueError(f"{op}: expected lengths, got the batch {size}")
    if size.lengths is not None and op not in PROMPT_OPS:
        raise ValueError(f"{op}: expected a batch such as N=8, got the lengths {size}")
    if raw and op != "prefill":
        raise ValueError(f"raw: expected prefill, got {op}, which has one form only")
    state = "" if state_dtype == torch.float32 else f"/{str(state_dtype).split('.')[1]}-state"
    case = Case(
        name=f"{op}/{shape.name}/tp{shape.tp}/{size}{state}{'/raw' if raw else ''}",
        op={"layer": "step", "train": "prefill"}.get(op, op),
        dtypes=(dtype,),
        Hk=shape.num_k_heads,
        Hv=shape.num_v_heads,
        K=shape.head_k_dim,
        V=shape.head_v_dim,
        W=shape.conv_width,
        bias=False,
        state="none" if op in ("rms_norm_gated", "train") else "slots",
        state_dtype=state_dtype,
        gate_activation=shape.gate_activation,
        **_tokens(op, size),
        **({"raw": True, "normalize": True} if raw else _inside(op, shape, size)),
    )
    return Workload(case, op, shape.name, shape.tp, size, "raw" if raw else "")


def _tokens(op: str, size: Size) -> dict[str, Any]:
    """How the tokens are laid out."""
    if size.lengths is None:
        return {"batch": size.batch, "tokens": DRAFTS if op == "verify" else 1}
    if op == "rms_norm_gated":
        return {"batch": 1, "tokens": size.tokens}
    if op == "layer":  # a layer's projections are [B, T, ..]: not packed, so of one length
        if len(set(size.lengths)) > 1:
            raise ValueError(f"layer: expected prompts of one length, got {size}")
        return {"batch": len(size.lengths), "tokens": size.lengths[0]}
    return {"lengths": size.lengths, "host_lengths": True}


def _inside(op: str, shape: Any, size: Size) -> dict[str, Any]:
    """What the operator does besides its own part, and the order of its projections."""
    if op in ("decode", "verify"):
        # speculative decoding always accepts at least one token
        kept = tuple(1 + i % DRAFTS for i in range(size.batch)) if op == "verify" else None
        return {"raw": True, "normalize": True, "accepted": kept}
    if op in ("step", "layer"):
        split = shape.order == "split"
        flat = op == "step"
        return {"order": shape.order, "pairs": split, "flat": flat, "normalize": True}
    return {"normalize": op == "conv_qkv"}
