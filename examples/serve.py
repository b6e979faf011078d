"""A serving engine from scratch, to read from top to bottom.

    python examples/serve.py --check                    # random weights; compare with generate()
    python examples/serve.py --model PATH --speculate 4

Continuous batching with chunked prefill, decode by ``step``, prefix caching by checkpoints and
``fork``, speculative decoding by ``verify`` and ``commit``, CUDA graphs on a GPU. The model is a
transformers one; its gated delta layers run through sluice, with their states in one ``StatePool``.
docs/serving.md walks through it.
"""

# ruff: noqa: T201
from __future__ import annotations

import argparse
import collections
import itertools
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import sluice
from sluice.integrations.transformers import plain_torch
from sluice.progress import counted

BLOCK = 32  # tokens: a prefix is cached at multiples of this
CHUNK = 128  # tokens: so much of the prompts is read in one iteration


class Keys:
    """Keys and values of one sequence's full-attention layers, as transformers' layers ask."""

    def __init__(self, kept: dict[int, tuple[Tensor, Tensor]] | None = None) -> None:
        self.kept = kept or {}

    def update(self, k: Tensor, v: Tensor, layer: int, *_: Any) -> tuple[Tensor, Tensor]:
        if layer in self.kept:
            k, v = (torch.cat(pair, 2) for pair in zip(self.kept[layer], (k, v), strict=True))
        self.kept[layer] = k, v
        return k, v

    def first(self, n: int) -> Keys:
        """Those of the first ``n`` tokens; nothing is copied."""
        return Keys({i: (k[:, :, :n], v[:, :, :n]) for i, (k, v) in self.kept.items()})


@dataclass(eq=False)
class Sequence:
    """One request. Its slot and keys have seen the first ``done`` of its ``tokens``."""

    prompt: list[int]
    new_tokens: int
    tokens: list[int] = field(default_factory=list)
    done: int = 0
    slot: Any = None
    keys: Keys = field(default_factory=Keys)

    @property
    def left(self) -> int:
        return len(self.prompt) + self.new_tokens - len(self.tokens)


class Graph:
    """One layer's decode as a CUDA graph: always ``rows`` rows, and padding where there are fewer.

    A pool's memory never moves, so a graph may keep its addresses. Padded rows have slot -1.
    """

    def __init__(self, net: sluice.GatedDeltaNet, states: dict[str, Tensor], rows: int) -> None:
        like = net.out_proj.weight
        self.x = like.new_zeros(rows, net.shape.hidden)
        self.slots = torch.full((rows,), -1, device=like.device)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            net(self.x, slots=self.slots, **states)  # compiles; every row is padding
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.y = net(self.x, slots=self.slots, **states)

    def __call__(self, x: Tensor, slots: Tensor) -> Tensor:
        self.slots.fill_(-1)
        self.slots[: len(slots)] = slots
        self.x[: len(x)] = x
        self.graph.replay()
        return self.y[: len(x)].clone()


class Engine:
    """Requests go in with ``add``; ``step`` moves all of them on, until ``busy`` is False."""

    def __init__(self, model: Any, slots: int = 16, speculate: int = 0) -> None:
        self.model, self.inner, self.speculate = model, model.model, speculate
        self.device, dtype = model.lm_head.weight.device, model.lm_head.weight.dtype
        self.pool = sluice.StatePool.for_model(
            model.config, slots=slots, conv_dtype=dtype, device=self.device
        )
        mixers = [x.linear_attn for x in self.inner.layers if hasattr(x, "linear_attn")]
        self.nets = [sluice.GatedDeltaNet.from_transformers(mixer) for mixer in mixers]
        self.states = [
            dict(zip(("conv_state", "state"), self.pool.layer(i), strict=True))
            for i in range(len(self.nets))
        ]
        self.graphs = []
        if self.device.type == "cuda":
            pairs = zip(self.nets, self.states, strict=True)
            self.graphs = [Graph(net, states, slots) for net, states in pairs]
        self.waiting: collections.deque[Sequence] = collections.deque()
        self.running: list[Sequence] = []
        # tokens of a prefix -> the slot and keys after it, the least recently used first
        self.prefixes: collections.OrderedDict[tuple[int, ...], tuple[Any, Keys]]
        self.prefixes = collections.OrderedDict()
        self.counts: collections.Counter[str] = collections.Counter()

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, prompt: list[int], new_tokens: int) -> Sequence:
        self.waiting.append(Sequence(prompt, new_tokens, list(prompt)))
        return self.waiting[-1]

    @torch.inference_mode()
    def step(self) -> None:
        """Admit requests, read a chunk of the prompts, decode, let go of what is complete."""
        while self.waiting and self._admit(self.waiting[0]):
            self.running.append(self.waiting.popleft())
        work, budget = [], CHUNK
        for s in self.running:
            part = s.prompt[s.done : s.done + budget]
            if part:
                work.append((s, part))
                budget -= len(part)
        if work:
            self._prefill(work)
        ready = [s for s in self.running if len(s.tokens) > len(s.prompt) and s.left]
        if ready:
            self._verify(ready) if self.speculate else self._decode(ready)
        for s in [s for s in self.running if not s.left]:
            self.running.remove(s)
            self.pool.free(s.slot)

    # ---- slots and prefixes ----------------------------------------------------------------------

    def _admit(self, s: Sequence) -> bool:
        """Give a sequence its slot: a fork of the longest cached prefix, or a new one."""
        longest = (len(s.prompt) - 1) // BLOCK * BLOCK  # the last token must be read for its logits
        for n in range(longest, 0, -BLOCK):
            known = tuple(s.prompt[:n])
            if known in self.prefixes:
                self.prefixes.move_to_end(known)
                if not self._make_room(keep=1):
                    break
                slot, keys = self.prefixes[known]
                (s.slot,), s.keys, s.done = self.pool.fork(slot), keys.first(n), n
                self.counts["prompt tokens from the cache"] += n
                return True
        if not self._make_room():
            return False
        (s.slot,) = self.pool.allocate()
        return True

    def _make_room(self, keep: int = 0) -> bool:
        """Free a slot if none is free: that of the prefix not used for longest."""
        while not self.pool.available and len(self.prefixes) > keep:
            _, (slot, _) = self.prefixes.popitem(last=False)
            self.pool.free(slot)
        return self.pool.available > 0

    # ---- the three ways of a token ---------------------------------------------------------------

    def _prefill(self, work: list[tuple[Sequence, list[int]]]) -> None:
        """Parts of several prompts, packed; the state at a block's border is kept as a prefix."""
        slots, positions, new = [], [], []
        for s, part in work:
            border = (s.done + len(part)) // BLOCK * BLOCK
            prefix = tuple(s.prompt[:border])
            take = border > s.done and prefix not in self.prefixes and self.pool.available > 0
            take = take and prefix not in [known for known, _, _ in new]
            (slot,) = self.pool.allocate() if take else (-1,)
            slots.append([int(slot)])
            positions.append([border - s.done if take else 0])
            new += [(prefix, slot, s)] if take else []
        at = {"slots": self._slots(work), "cu_seqlens": _bounds(work, self.device)}
        kept = sluice.Checkpoints(
            torch.tensor(slots, device=self.device),
            positions=torch.tensor(positions, device=self.device),
        )
        logits = self._forward(
            work, lambda i, x: self.nets[i](x, checkpoints=kept, **at, **self.states[i])
        )
        for (s, part), row in zip(work, _last(work), strict=True):
            s.done += len(part)
            if s.done == len(s.prompt):
                s.tokens.append(int(logits[row].argmax()))
        for prefix, slot, s in new:
            self.prefixes[prefix] = slot, s.keys.first(len(prefix))
        self.counts["prompt tokens"] += sum(len(part) for _, part in work)

    def _decode(self, ready: list[Sequence]) -> None:
        """One token of every sequence: ``GatedDeltaNet`` runs it as one ``step`` a layer."""
        work = [(s, s.tokens[-1:]) for s in ready]
        slots = self._slots(work)

        def mix(i: int, x: Tensor) -> Tensor:
            if self.graphs:
                return self.graphs[i](x[0], slots)[None]
            return self.nets[i](x[0], slots=slots, **self.states[i])[None]

        for s, row in zip(ready, self._forward(work, mix), strict=True):
            s.done += 1
            s.tokens.append(int(row.argmax()))
        self.counts["new tokens"] += len(ready)

    def _verify(self, ready: list[Sequence]) -> None:
        """The last token of every sequence and guesses after it; only right ones are committed."""
        work = [
            (s, s.tokens[-1:] + guess(s.tokens, min(self.speculate, s.left - 1))) for s in ready
        ]
        at = {"slots": self._slots(work), "cu_seqlens": _bounds(work, self.device)}
        drafts = []

        def mix(i: int, x: Tensor) -> Tensor:
            y, draft = self.nets[i].verify(x, **at, **self.states[i])
            drafts.append(draft)
            return y

        picks = self._forward(work, mix).argmax(-1).tolist()
        accepted, row = [], 0
        for s, part in work:
            right = picks[row : row + len(part)]
            row += len(part)
            n = 1  # the last token was no guess
            while n < len(part) and part[n] == right[n - 1]:
                n += 1
            accepted.append(n)
            s.tokens += right[:n]
            s.done += n
            s.keys = s.keys.first(s.done)
        for draft in drafts:
            sluice.commit(draft, torch.tensor(accepted, device=self.device))
        self.counts["new tokens"] += sum(accepted)
        self.counts["guesses"] += sum(len(part) - 1 for _, part in work)
        self.counts["right guesses"] += sum(accepted) - len(accepted)

    # ---- the model -------------------------------------------------------------------------------

    def _forward(self, work: list[tuple[Sequence, list[int]]], mix: Any) -> Tensor:
        """Logits [tokens, words] of packed tokens; ``mix(i, x)`` is the i-th gated delta layer."""
        ids = torch.tensor([t for _, part in work for t in part], device=self.device)
        x, linear = self.inner.embed_tokens(ids)[None], itertools.count()
        for layer in self.inner.layers:
            h = layer.input_layernorm(x)
            if hasattr(layer, "linear_attn"):
                x = x + mix(next(linear), h)
            else:
                x = x + self._attend(layer.self_attn, h, work)
            h = layer.mlp(layer.post_attention_layernorm(x))
            x = x + (h[0] if isinstance(h, tuple) else h)
        return self.model.lm_head(self.inner.norm(x))[0]

    def _attend(self, attention: nn.Module, x: Tensor, work: list[Any]) -> Tensor:
        """Full attention, sequence by sequence: it is not what this library is about."""
        outputs = []
        for (s, part), h in zip(work, x.split([len(part) for _, part in work], 1), strict=True):
            at = torch.arange(s.done, s.done + len(part), device=x.device)
            seen = torch.arange(s.done + len(part), device=x.device) <= at[:, None]
            mask = torch.zeros(seen.shape, dtype=x.dtype, device=x.device)
            mask = mask.masked_fill(~seen, torch.finfo(x.dtype).min)[None, None]
            turns = self.inner.rotary_emb(h, at[None])
            outputs.append(attention(h, turns, mask, past_key_values=s.keys)[0])
        return torch.cat(outputs, 1)

    def _slots(self, work: list[tuple[Sequence, list[int]]]) -> Tensor:
        return self.pool.indices([s.slot for s, _ in work])


def guess(tokens: list[int], n: int) -> list[int]:
    """What followed the last two tokens when they last occurred: a draft without a draft model."""
    for i in range(len(tokens) - 3, 0, -1) if n > 0 else ():
        if tokens[i - 1 : i + 1] == tokens[-2:]:
            return tokens[i + 1 : i + 1 + n]
    return []


def _bounds(work: list[tuple[Sequence, list[int]]], device: torch.device) -> Tensor:
    """The borders of packed sequences, [N + 1]."""
    ends = itertools.accumulate((len(part) for _, part in work), initial=0)
    return torch.tensor(list(ends), dtype=torch.int32, device=device)


def _last(work: list[tuple[Sequence, list[int]]]) -> list[int]:
    """The row of each sequence's last token."""
    return [end - 1 for end in itertools.accumulate(len(part) for _, part in work)]


def serve(engine: Engine, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    """The new tokens of every prompt, with a progress display."""
    sequences = [engine.add(prompt, new_tokens) for prompt in prompts]
    with counted() as show:
        while engine.busy:
            engine.step()
            made = sum(len(s.tokens) - len(s.prompt) for s in sequences)
            running, waiting = len(engine.running), len(engine.waiting)
            show(f"{running} running, {waiting} waiting", made, new_tokens * len(prompts))
    return [s.tokens[len(s.prompt) :] for s in sequences]


def one_by_one(model: Any, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    """The same by transformers' own layers and ``generate``, a prompt at a time."""
    outputs = []
    with plain_torch(model), torch.inference_mode():
        for prompt in prompts:
            ids = torch.tensor([prompt], device=model.device)
            made = model.generate(
                ids, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False
            )
            outputs.append(made[0, len(prompt) :].tolist())
    return outputs


def random_model(device: str) -> Any:
    """A small hybrid model: three gated delta layers, one with full attention."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    config = Qwen3_5TextConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=4,
        num_attention_heads=2, num_key_value_heads=1, head_dim=64, linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=32, linear_value_head_dim=32,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen3_5ForCausalLM(config).eval().requires_grad_(False)
    for layer in model.model.layers:
        if hasattr(layer, "linear_attn"):  # gates that remember, as those of trained models do
            layer.linear_attn.A_log.uniform_(0.05, 4.0).log_()
            layer.linear_attn.dt_bias.uniform_(0.01, 0.2).expm1_().log_()
    return model.to(device)


def make_prompts(words: int, n: int, length: int) -> list[list[int]]:
    """Prompts of several lengths that begin alike, as those of one application do."""
    draw = torch.Generator().manual_seed(1)
    common = torch.randint(1, words, (length // 2,), generator=draw).tolist()
    own = [length // 4 + 7 * i % (length // 4) for i in range(n)]
    return [common + torch.randint(1, words, (m,), generator=draw).tolist() for m in own]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", metavar="PATH", help="a checkpoint (default: random weights)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--prompt-length", type=int, default=160)
    parser.add_argument("--tokens", type=int, default=48, help="new tokens of each")
    parser.add_argument("--slots", type=int, default=16, help="of the pool: sequences and prefixes")
    parser.add_argument("--speculate", type=int, default=0, help="guesses a token, at most 7")
    parser.add_argument("--check", action="store_true", help="compare with generate(), one by one")
    args = parser.parse_args()
    if args.model is None:
        model = random_model(args.device)
    else:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto").to(args.device)
        model.eval().requires_grad_(False)
    engine = Engine(model, args.slots, min(args.speculate, 7))
    prompts = make_prompts(model.lm_head.weight.shape[0], args.prompts, args.prompt_length)
    serve(engine, prompts[:1], 4)  # compiles
    engine.counts.clear()
    begin = time.perf_counter()
    outputs = serve(engine, prompts, args.tokens)
    seconds = time.perf_counter() - begin
    for name, count in engine.counts.items():
        print(f"{count:>8,} {name}")
    print(f"{sum(map(len, outputs)) / seconds:>8,.0f} new tokens per second")
    if args.check:
        same = outputs == one_by_one(model, prompts, args.tokens)
        print("the same tokens as one by one" if same else "OTHER TOKENS than one by one")
        raise SystemExit(0 if same else 1)


if __name__ == "__main__":
    main()
