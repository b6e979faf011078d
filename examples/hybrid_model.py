"""What serve.py serves: a transformers model whose gated delta layers are left to the caller.

Full attention is as simple as it can be: for each token, the keys of its slot are gathered, and it
sees those up to its position. A real engine has a kernel for paged attention instead.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sluice.integrations.transformers import plain_torch


class HybridModel:
    """A transformers model, and keys and values of its attention layers for ``slots`` requests."""

    def __init__(self, model: Any, slots: int, context: int) -> None:
        self.model, self.context = model, context
        self.device, self.dtype = model.lm_head.weight.device, model.lm_head.weight.dtype
        self.rows = slots + 1  # the last one, -1, is for padding
        self.keys: dict[int, Tensor] = {}  # layer -> [2, rows, heads, context, width]

    def forward(self, inputs: Tensor, mix: Callable[[int, Tensor], Tensor]) -> Tensor:
        """Hidden states of tokens, [tokens, 1, hidden].

        ``inputs`` [3, tokens] has the id, the position and the slot of each token, and
        ``mix(i, x)`` runs the i-th gated delta layer on x [tokens, hidden].
        """
        ids, positions, self.slots = inputs
        self.positions, body, linear = positions, self.model.model, itertools.count()
        x = body.embed_tokens(ids)[:, None]
        turns = body.rotary_emb(x, positions[None, :, None].expand(3, -1, -1))  # of text: all alike
        later = torch.arange(self.context, device=self.device) > positions[:, None]
        mask = x.new_zeros(later.shape).masked_fill(later, float("-inf"))[:, None, None]
        for layer in body.layers:
            h = layer.input_layernorm(x)
            if hasattr(layer, "linear_attn"):
                h = mix(next(linear), h[:, 0])[:, None]
            else:
                h = layer.self_attn(h, turns, mask, past_key_values=self)[0]
            x = x + h
            h = layer.mlp(layer.post_attention_layernorm(x))
            x = x + (h[0] if isinstance(h, tuple) else h)
        return x

    def pick(self, x: Tensor) -> Tensor:
        """The most likely token after each token, [tokens]."""
        return self.model.lm_head(self.model.model.norm(x))[:, 0].argmax(-1)

    def update(self, k: Tensor, v: Tensor, layer: int, *_: Any) -> tuple[Tensor, Tensor]:
        """Called by transformers' attention: keep a key per token, return those of its slot."""
        if layer not in self.keys:
            size = (2, self.rows, k.shape[1], self.context, k.shape[3])
            self.keys[layer] = k.new_zeros(size)
        keys, values = self.keys[layer]
        keys[self.slots, :, self.positions] = k[:, :, 0]
        values[self.slots, :, self.positions] = v[:, :, 0]
        return keys[self.slots], values[self.slots]

    def copy(self, source: int, target: int) -> None:
        """Copy the keys and values of one slot to another."""
        for both in self.keys.values():
            both[:, target] = both[:, source]


def load(path: str | None, device: str) -> Any:
    """A checkpoint; or a small hybrid model: three gated delta layers, one with full attention."""
    import transformers

    if path is not None:
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype="auto")
        return model.eval().requires_grad_(False).to(device)
    config = transformers.Qwen3_5TextConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=4,
        num_attention_heads=2, num_key_value_heads=1, head_dim=64, linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=32, linear_value_head_dim=32,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Qwen3_5ForCausalLM(config).eval().requires_grad_(False)
    for layer in model.model.layers[:3]:  # gates that remember, as those of trained models do
        layer.linear_attn.A_log.uniform_(0.05, 4.0).log_()
        layer.linear_attn.dt_bias.uniform_(0.01, 0.2).expm1_().log_()
    return model.to(device)


def make_prompts(model: Any, n: int, length: int) -> list[list[int]]:
    """Prompts of several lengths that begin alike, as those of one application do."""
    draw, words = torch.Generator().manual_seed(1), model.lm_head.weight.shape[0]
    common = torch.randint(1, words, (length // 2,), generator=draw).tolist()
    own = [length // 4 + 7 * i % (length // 4) for i in range(n)]
    return [common + torch.randint(1, words, (m,), generator=draw).tolist() for m in own]


def one_by_one(model: Any, prompts: list[list[int]], new: int) -> list[list[int]]:
    """The new tokens of every prompt by stock transformers and ``generate``, a prompt at a time."""
    options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
    with plain_torch(model), torch.inference_mode():
        rows = (torch.tensor([prompt], device=model.device) for prompt in prompts)
        return [model.generate(ids, **options)[0, ids.shape[1] :].tolist() for ids in rows]
