"""A serving engine from scratch, to read from top to bottom. docs/serving.md walks through it.

    python examples/serve.py --check                    # random weights; compare with generate()
    python examples/serve.py --model PATH --speculate 4

It serves a transformers model (``hybrid_model.py``). Tokens of many requests go through the layers
together; gated delta layers run through sluice, and their states lie in a ``StatePool``.
"""

# ruff: noqa: T201
from __future__ import annotations

import argparse
import collections
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hybrid_model import HybridModel, load, make_prompts, one_by_one
from torch import Tensor

import sluice
from sluice import progress

BLOCK = 32  # tokens: a prefix is cached at multiples of this
CHUNK = 128  # tokens: so much of the prompts is read in one iteration


@dataclass(eq=False)
class Request:
    tokens: list[int]  # the prompt, then what was generated
    length: int  # with so many tokens it is complete
    read: int = 0  # so many tokens are in its state and among its keys
    slot: int = -1


Work = list[tuple[Request, list[int]]]  # requests, each with the tokens that it reads next


class Graph:
    """A function of ids, positions and slots [3, rows] as a CUDA graph; spare rows are padding."""

    def __init__(self, run: Callable[[Tensor], Tensor], rows: int, device: torch.device) -> None:
        self.inputs = torch.zeros(3, rows, dtype=torch.int64, device=device)
        self.inputs[2] = -1  # the slot of padding, which touches no state
        run(self.inputs)  # compiles what a capture could not
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.outputs = run(self.inputs)

    def __call__(self, inputs: Tensor) -> Tensor:
        n = inputs.shape[1]
        self.inputs[:, :n] = inputs
        self.inputs[2, n:] = -1
        self.graph.replay()
        return self.outputs[:n]


class Engine:
    """Append requests to ``waiting``; each ``step`` moves all of them on."""

    @torch.inference_mode()
    def __init__(
        self, model: Any, slots: int, context: int, speculate: int = 0, graphs: bool = False
    ) -> None:
        self.model, self.speculate = HybridModel(model, slots, context), speculate
        self.device = self.model.device
        self.pool = sluice.StatePool.for_model(
            model.config, slots=slots, conv_dtype=self.model.dtype, device=self.device
        )
        mixers = [x.linear_attn for x in model.model.layers if hasattr(x, "linear_attn")]
        self.nets = [sluice.GatedDeltaNet.from_transformers(mixer) for mixer in mixers]
        pairs = [self.pool.layer(i) for i in range(len(mixers))]
        self.states = [{"conv_state": conv, "state": state} for conv, state in pairs]
        self.waiting: collections.deque[Request] = collections.deque()
        self.running: list[Request] = []
        # tokens of a prefix -> the slot with the state after it, the least recently used first
        self.prefixes: collections.OrderedDict[tuple[int, ...], int] = collections.OrderedDict()
        self.counts: collections.Counter[str] = collections.Counter()
        sizes = [n for n in (1, 2, 4, 8, 16, 32, 64) if n < slots] + [slots] if graphs else []
        self.graphs = {n: Graph(self._decode, n, self.device) for n in sizes}

    @torch.inference_mode()
    def step(self) -> None:
        """Admit requests, read a chunk of the prompts, generate, let go of what is complete."""
        while self.waiting and self._admit(self.waiting[0]):
            self.running.append(self.waiting.popleft())
        work, budget = [], CHUNK
        for r in self.running:
            if part := r.tokens[r.read : -1][:budget]:  # _generate reads the last token
                work.append((r, part))
                budget -= len(part)
        if work:
            self._prefill(work)
        if ready := [r for r in self.running if r.read == len(r.tokens) - 1]:
            self._generate(ready)
        for r in [r for r in self.running if len(r.tokens) == r.length]:
            self.running.remove(r)
            self.pool.free(r.slot)

    def _admit(self, r: Request) -> bool:
        """Give a request its slot: a fork of the longest cached prefix, or an empty one."""
        borders = range((len(r.tokens) - 1) // BLOCK * BLOCK, 0, -BLOCK)
        starts = (tuple(r.tokens[:n]) for n in borders)
        prefix = next((start for start in starts if start in self.prefixes), ())
        if prefix:
            self.prefixes.move_to_end(prefix)
        while not self.pool.available and self.prefixes:  # drop the least recently used
            self.pool.free(self.prefixes.popitem(last=False)[1])
        if not self.pool.available:
            return False
        if prefix in self.prefixes:
            (r.slot,), r.read = self.pool.fork(self.prefixes[prefix]), len(prefix)
            self.model.copy(self.prefixes[prefix], r.slot)
            self.counts["prompt tokens from the cache"] += r.read
        else:
            (r.slot,) = self.pool.allocate()
        return True

    def _prefill(self, work: Work) -> None:
        """Read parts of prompts; the state at each border of a block is kept as a prefix."""
        kept = [[] for _ in work]  # of each request: slots, and the positions in its part
        for (r, part), mine in zip(work, kept, strict=True):
            for border in range(r.read // BLOCK * BLOCK + BLOCK, r.read + len(part) + 1, BLOCK):
                prefix = tuple(r.tokens[:border])
                if prefix not in self.prefixes and self.pool.available:
                    (self.prefixes[prefix],) = self.pool.allocate()
                    mine.append((self.prefixes[prefix], border - r.read))
        most = max(map(len, kept)) or 1
        padded = [mine + [(-1, 0)] * (most - len(mine)) for mine in kept]  # -1: none
        slots, positions = torch.tensor(padded, device=self.device).unbind(-1)
        inputs, where = self._packed(work)
        where["checkpoints"] = sluice.Checkpoints(slots, positions=positions)
        self.model.forward(inputs, lambda i, x: self.nets[i](x, **where, **self.states[i]))
        for (r, part), mine in zip(work, kept, strict=True):
            r.read += len(part)
            for slot, _ in mine:
                self.model.copy(r.slot, slot)
        self.counts["prompt tokens"] += inputs.shape[1]

    def _generate(self, ready: list[Request]) -> None:
        """The next token of every request, or several where guesses turn out to be right."""
        work, drafts, accepted = [], [], []
        for r in ready:
            most = min(self.speculate, r.length - len(r.tokens) - 1)
            work.append((r, r.tokens[-1:] + guess(r.tokens, most)))

        def verify(i: int, x: Tensor) -> Tensor:
            y, draft = self.nets[i].verify(x, **where, **self.states[i])  # writes no state
            drafts.append(draft)
            return y

        inputs, where = self._packed(work)
        if inputs.shape[1] > len(work):
            picks = self.model.pick(self.model.forward(inputs, verify))
        else:  # there is no guess
            sizes = [n for n in self.graphs if n >= len(work)]
            picks = self.graphs[min(sizes)](inputs) if sizes else self._decode(inputs)
        after = iter(picks.tolist())  # what the model says after each token
        for r, part in work:
            right = [next(after) for _ in part]
            wrong = (i for i in range(1, len(part)) if part[i] != right[i - 1])
            n = next(wrong, len(part))
            r.tokens += right[:n]
            r.read += n
            accepted.append(n)
        for draft in drafts:
            sluice.commit(draft, torch.tensor(accepted, device=self.device))
        self.counts["guesses"] += inputs.shape[1] - len(work)
        self.counts["right guesses"] += sum(accepted) - len(work)

    def _decode(self, inputs: Tensor) -> Tensor:
        """One token per row, without borders: ``GatedDeltaNet`` runs a layer as one ``step``."""
        at = {"slots": inputs[2]}
        x = self.model.forward(inputs, lambda i, x: self.nets[i](x, **at, **self.states[i]))
        return self.model.pick(x)

    def _packed(self, work: Work) -> tuple[Tensor, dict[str, Any]]:
        """Id, position and slot of each token, one request after the other; and the borders."""
        rows = [(t, r.read + i, r.slot) for r, part in work for i, t in enumerate(part)]
        ends = list(itertools.accumulate((len(part) for _, part in work), initial=0))
        slots = self.pool.indices([r.slot for r, _ in work])
        borders = torch.tensor(ends, dtype=torch.int32, device=self.device)
        return torch.tensor(rows, device=self.device).T, {"slots": slots, "cu_seqlens": borders}


def guess(tokens: list[int], n: int) -> list[int]:
    """What followed the last two tokens when they last occurred: a draft without a draft model."""
    for i in range(len(tokens) - 3, 0, -1) if n > 0 else ():
        if tokens[i - 1 : i + 1] == tokens[-2:]:
            return tokens[i + 1 : i + 1 + n]
    return []


def serve(engine: Engine, prompts: list[list[int]], new: int) -> list[list[int]]:
    """The new tokens of every prompt, with a progress display."""
    requests = [Request(list(prompt), len(prompt) + new) for prompt in prompts]
    engine.waiting += requests
    with progress.counted() as show:
        while engine.waiting or engine.running:
            engine.step()
            made = sum(len(r.tokens) - r.length + new for r in requests)
            state = f"{len(engine.running)} running, {len(engine.waiting)} waiting"
            show(state, made, new * len(requests))
    return [r.tokens[-new:] for r in requests]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", metavar="PATH", help="a checkpoint (default: random weights)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=48, help="new tokens of each")
    parser.add_argument("--slots", type=int, default=16, help="of the pool: requests and prefixes")
    parser.add_argument("--speculate", type=int, default=0, help="guesses per token, at most 7")
    parser.add_argument("--check", action="store_true", help="compare with generate(), one by one")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    args = parser.parse_args()
    if graphs := args.device.startswith("cuda") and not args.eager:
        # graphs are captured on the current device
        torch.cuda.set_device(torch.device(args.device).index or 0)
    model = load(args.model, args.device)
    prompts = make_prompts(model, args.prompts, 160)
    context = max(map(len, prompts)) + args.tokens
    engine = Engine(model, args.slots, context, min(args.speculate, 7), graphs)
    serve(engine, prompts[:1], 4)  # compiles
    engine.counts.clear()
    begin = time.perf_counter()
    outputs = serve(engine, prompts, args.tokens)
    speed = sum(map(len, outputs)) / (time.perf_counter() - begin)
    for name, count in engine.counts.items():
        print(f"{count:>8,} {name}")
    print(f"{speed:>8,.0f} new tokens per second")
    if args.check:
        same = outputs == one_by_one(model, prompts, args.tokens)
        print("the same tokens as one by one" if same else "OTHER TOKENS than one by one")
        raise SystemExit(0 if same else 1)


if __name__ == "__main__":
    main()
