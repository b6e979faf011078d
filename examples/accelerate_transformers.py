"""Load a transformers model, accelerate it, generate: tokens per second before and after.

    python examples/accelerate_transformers.py MODEL_DIR --prompt "The sluice opens"
    python examples/accelerate_transformers.py --random          # no weights at hand

MODEL_DIR is a directory (or a name) of a Qwen3-Next, Qwen3.5 or Qwen3.5-MoE model. ``--random``
builds a small Qwen3.5 with random weights instead, whose layers have the heads of the 0.8B model.
"""

# ruff: noqa: T201
from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from torch import Tensor, nn

import sluice
from sluice.integrations.transformers import plain_torch


def random_model() -> nn.Module:
    """Two gated delta layers and one with full attention."""
    from transformers.models.qwen3_5 import Qwen3_5TextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM

    config = Qwen3_5TextConfig(
        vocab_size=1000,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=3,
        layer_types=["linear_attention", "linear_attention", "full_attention"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=128,
        linear_num_key_heads=16,
        linear_num_value_heads=16,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    return Qwen3_5ForCausalLM(config)


def load(args: argparse.Namespace) -> tuple[nn.Module, Tensor, Any]:
    """The model, a prompt [1, T], and the tokenizer (None with random weights)."""
    if args.random:
        model, tokenizer = random_model().to(args.device), None
        ids = torch.randint(1, 1000, (1, args.prompt_tokens))
    else:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(args.model)
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto").to(args.device)
        ids = tokenizer(args.prompt, return_tensors="pt").input_ids
    return model.eval(), ids.to(args.device), tokenizer


def timed(model: Any, ids: Tensor, n: int) -> tuple[Tensor, float, float]:
    """The new tokens, seconds to the first one, and tokens per second after it."""

    def run(tokens: int) -> tuple[Tensor, float]:
        start = time.perf_counter()
        out = model.generate(
            ids, max_new_tokens=tokens, do_sample=False, attention_mask=torch.ones_like(ids)
        )
        if ids.device.type == "cuda":
            torch.cuda.synchronize()
        return out[:, ids.shape[1] :], time.perf_counter() - start

    run(2)  # compiles and loads what the first use needs
    _, first = run(1)
    new, whole = run(n)
    return new, first, (new.shape[1] - 1) / max(whole - first, 1e-9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="directory or name of a model")
    parser.add_argument("--random", action="store_true", help="a small model, random weights")
    parser.add_argument("--prompt", default="The sluice opens, and")
    parser.add_argument("--prompt-tokens", type=int, default=256, help="with --random")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    if args.random == (args.model is not None):
        parser.error("give a model, or --random")
    model, ids, tokenizer = load(args)
    print(f"{type(model).__name__} on {args.device}, prompt of {ids.shape[1]} tokens")
    found = {}
    with torch.inference_mode():
        if args.device == "cpu":  # FLA has no CPU kernels, but stock would choose it
            with plain_torch(model):
                found["before"] = timed(model, ids, args.new_tokens)
        else:
            found["before"] = timed(model, ids, args.new_tokens)
        sluice.accelerate(model)
        found["after"] = timed(model, ids, args.new_tokens)
    for name, (_, first, rate) in found.items():
        print(f"{name:8} first token {first * 1e3:8.1f} ms    then {rate:8.1f} tokens/s")
    before, after = found["before"], found["after"]
    first, rate = before[1] / after[1], after[2] / before[2]
    print(f"{'faster':8} first token {first:8.2f} x     then {rate:8.2f} x")
    same = int((before[0] == after[0]).sum()) if before[0].shape == after[0].shape else 0
    print(f"{same} of {after[0].numel()} tokens are the same")
    if tokenizer is not None:
        print(tokenizer.decode(after[0][0]))


if __name__ == "__main__":
    main()
