"""Train a small Qwen3.5-shaped model with sluice: two minutes on a CPU, the same command on a GPU.

    pip install '.[transformers]'
    python examples/train_small_model.py                 # 300 steps, a progress bar, a loss curve
    python examples/train_small_model.py --compare       # stock transformers beside it
    python examples/train_small_model.py --device cuda --dtype bfloat16

The model learns to continue Python: its text is the source of a module of the standard library,
cut into packed sequences of different lengths, as a collator for padding-free training makes them.
"""
# ruff: noqa: T201

from __future__ import annotations

import argparse
import copy
import inspect
import itertools
import sys
import time
from collections.abc import Iterator

import torch
from transformers.models.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5TextConfig

import sluice
from sluice.integrations.transformers import plain_torch

HEIGHT, WIDTH = 12, 72


def small_model(seed: int) -> Qwen3_5ForCausalLM:
    """Three gated delta layers and one of full attention; 256 tokens: bytes."""
    torch.manual_seed(seed)
    config = Qwen3_5TextConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        pad_token_id=0,
        eos_token_id=0,
    )
    return Qwen3_5ForCausalLM(config)


def batches(tokens: int, seed: int, packed: bool) -> Iterator[dict[str, torch.Tensor]]:
    """Rows of text; packed: one row of sequences of random lengths, with their borders."""
    text = torch.tensor(list(inspect.getsource(argparse).encode()), dtype=torch.int64)
    gen = torch.Generator().manual_seed(seed)

    def piece(length: int) -> torch.Tensor:
        start = int(torch.randint(len(text) - length, (1,), generator=gen))
        return text[start : start + length]

    while True:
        if not packed:
            ids = torch.stack([piece(tokens // 4) for _ in range(4)])
            yield {"input_ids": ids, "labels": ids}
            continue
        cuts = torch.randint(32, tokens - 32, (3,), generator=gen).sort().values.tolist()
        lengths = [b - a for a, b in zip([0, *cuts], [*cuts, tokens], strict=True)]
        lengths = [n for n in lengths if n > 1]
        ids = torch.cat([piece(n) for n in lengths]).unsqueeze(0)
        borders = torch.tensor([0, *lengths]).cumsum(0)
        labels = ids.clone()
        labels[0, borders[:-1]] = -100  # the first token of a sequence has nothing before it
        position = torch.cat([torch.arange(n) for n in lengths]).unsqueeze(0)
        yield {
            "input_ids": ids,
            "labels": labels,
            "position_ids": position,
            "cu_seq_lens_q": borders.int(),
            "cu_seq_lens_k": borders.int(),
            "max_length_q": max(lengths),
            "max_length_k": max(lengths),
        }


def train(model, args: argparse.Namespace, name: str) -> list[float]:
    """The loss of every step."""
    model = model.to(args.device, getattr(torch, args.dtype)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    source = batches(args.tokens, args.seed, args.packed)
    losses, start = [], time.perf_counter()
    for step in range(1, args.steps + 1):
        batch = {
            key: x.to(args.device) if isinstance(x, torch.Tensor) else x
            for key, x in next(source).items()
        }
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        seconds = time.perf_counter() - start
        left = seconds / step * (args.steps - step)
        bar = "#" * (30 * step // args.steps)
        sys.stderr.write(
            f"\r{name:12s} [{bar:30s}] {step}/{args.steps}  loss {losses[-1]:.3f}  "
            f"{seconds:.0f} s, {left:.0f} s left "
        )
    sys.stderr.write("\n")
    rate = args.steps * args.tokens / (time.perf_counter() - start)
    print(f"{name}: loss {losses[0]:.3f} -> {losses[-1]:.3f}, {rate:.0f} tokens/s")
    return losses


def curve(losses: list[float]) -> str:
    """The losses as text, averaged per column."""
    columns = min(WIDTH, len(losses))
    cuts = [len(losses) * i // columns for i in range(columns + 1)]
    means = [sum(losses[a:b]) / (b - a) for a, b in itertools.pairwise(cuts)]
    low, high = min(means), max(means)
    rows = []
    for row in range(HEIGHT):
        level = high - (high - low) * row / (HEIGHT - 1)
        half = (high - low) / (HEIGHT - 1) / 2
        marks = "".join("*" if abs(m - level) <= half else " " for m in means)
        rows.append(f"{level:7.3f} |{marks}")
    return "\n".join([*rows, " " * 8 + "+" + "-" * columns + f"  {len(losses)} steps"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--tokens", type=int, default=512, help="per step")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compare", action="store_true", help="train stock transformers too")
    args = parser.parse_args()
    args.packed = not args.compare  # stock's torch functions mix packed sequences
    model = small_model(args.seed)
    other = copy.deepcopy(model)
    losses = train(sluice.accelerate(model), args, "sluice")
    print(curve(losses))
    if args.compare:
        with plain_torch(other):
            stock = train(other, args, "transformers")
        apart = [abs(a - b) for a, b in zip(losses, stock, strict=True)]
        worst = max(range(len(apart)), key=apart.__getitem__)
        print(f"losses differ by at most {apart[worst]:.1e} (step {worst + 1})")


if __name__ == "__main__":
    main()
