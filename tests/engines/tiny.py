"""Small random models on disk, prompts for them, and what transformers answers."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

VOCABULARY, NEW_TOKENS = 512, 12
CONFIG: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "full_attention_interval": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,  # as many bytes a token as make small blocks
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "max_position_embeddings": 2048,
    "mamba_ssm_dtype": "float32",
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


EXPERTS = {name for name in CONFIG if "expert" in name or name.startswith("moe_")}


def model(seed: int = 0, family: str = "Qwen3Next") -> nn.Module:
    """Random float32 weights of a size that makes logits differ and states matter.

    ``Qwen3Next`` has experts and the interleaved order of weights, ``Qwen3_5`` neither.
    """
    import transformers

    config = CONFIG
    if family == "Qwen3_5":
        config = {name: value for name, value in CONFIG.items() if name not in EXPERTS}
    kind = f"{family}TextConfig" if family == "Qwen3_5" else f"{family}Config"
    torch.manual_seed(seed)
    made = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, kind)(**config))
    for module in made.modules():
        kind = type(module).__name__
        if kind.endswith("GatedDeltaNet"):
            module.conv1d.weight.data.normal_(std=0.5)
            module.A_log.data.uniform_(0.05, 4.0).log_()
            module.dt_bias.data.uniform_(0.02, 0.2).expm1_().log_()
        elif isinstance(module, nn.Embedding):
            module.weight.data.normal_()
        elif kind.endswith("TopKRouter"):  # far from a tie: other rounding, the same experts
            module.weight.data.normal_(std=4 * module.weight.shape[-1] ** -0.5)
        if isinstance(module, nn.Linear) or kind.endswith("Experts"):
            for p in module.parameters(recurse=False):
                p.data.normal_(std=p.shape[-1] ** -0.5)
    return made.eval().requires_grad_(False)


def save(made: nn.Module, folder: Path) -> Path:
    """As a checkpoint that engines load."""
    made.save_pretrained(folder, safe_serialization=True)
    return folder


def prompts(lengths: list[int], each: int = 1, seed: int = 0) -> list[list[int]]:
    """Random tokens: ``each`` prompts of each length, in an order that mixes them."""
    draw = random.Random(seed)
    made = [[draw.randrange(VOCABULARY) for _ in range(n)] for n in lengths for _ in range(each)]
    draw.shuffle(made)
    return made


def greedy(
    made: nn.Module, asked: list[list[int]], new: int
) -> tuple[list[list[int]], list[torch.Tensor]]:
    """What stock transformers continues prompts with, and log probabilities of the first token.

    Prompts of one length make a batch, so there is no padding.
    """
    from transformers import DynamicCache

    found: list[list[int]] = [[] for _ in asked]
    first = [torch.empty(0) for _ in asked]
    rows: dict[int, list[int]] = {}
    for i, prompt in enumerate(asked):
        rows.setdefault(len(prompt), []).append(i)
    for group in rows.values():
        cache = DynamicCache(config=made.config)
        step = torch.tensor([asked[i] for i in group])
        with torch.inference_mode():
            for t in range(new):
                logits = made(step, past_key_values=cache, use_cache=True).logits[:, -1]
                step = logits.argmax(-1, keepdim=True)
                for i, row, token in zip(group, logits, step.flatten().tolist(), strict=True):
                    found[i].append(token)
                    if t == 0:
                        first[i] = row.float().log_softmax(-1)
    return found, first


class Truth(NamedTuple):
    """A model on disk, prompts, and what stock transformers in float32 answers them."""

    folder: str
    model: Any
    prompts: list[list[int]]
    tokens: list[list[int]]
    logprobs: list[torch.Tensor]  # of the first token, all of the vocabulary


def add_drafter(truth: Truth) -> None:
    """A layer that predicts drafts (MTP), in the model's folder.

    Its projection is fitted to the model's own text, so that some of its drafts are right: from a
    token and the hidden state before it to the hidden state after it. Its layer adds nothing.
    """
    from safetensors.torch import load_file, save_file

    inner, seen, wanted = truth.model.model, [], []
    with torch.inference_mode():
        for prompt, tokens in zip(truth.prompts, truth.tokens, strict=True):
            text = torch.tensor([prompt + tokens])
            hidden = inner(text).last_hidden_state[0]
            before = torch.cat([inner.embed_tokens(text)[0, 1:], hidden[:-1]]).unflatten(0, (2, -1))
            one = before * before.square().mean(-1, keepdim=True).rsqrt()  # as its two norms do
            seen.append(torch.cat([one[0], one[1]], dim=1))
            wanted.append(hidden[1:])
    fitted = torch.linalg.lstsq(torch.cat(seen), torch.cat(wanted)).solution
    (file,) = Path(truth.folder).glob("*.safetensors")
    weights = load_file(file)
    last = f"model.layers.{CONFIG['num_hidden_layers'] - 1}."
    for name in [name for name in weights if name.startswith(last)]:
        adds = "o_proj" in name or "down_proj" in name
        copy = torch.zeros_like(weights[name]) if adds else weights[name].clone()
        weights[name.replace(last, "mtp.layers.0.")] = copy
    weights["mtp.fc.weight"] = fitted.T.contiguous()
    for name in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding"):
        weights[f"mtp.{name}.weight"] = torch.zeros(CONFIG["hidden_size"])
    save_file(weights, file, metadata={"format": "pt"})
    config = Path(truth.folder) / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "num_nextn_predict_layers": 1}))


def known_answers(
    folder: str, seed: int, family: str = "Qwen3Next", *, rounded: bool = False
) -> Truth:
    """64 prompts of 1 to 100 tokens; some repeat themselves, so that n-grams find drafts.

    ``rounded``: bfloat16 holds the weights, so an engine in bfloat16 has the same ones.
    """
    torch.set_num_threads(1)
    made = model(seed, family)
    if rounded:
        for p in made.parameters():
            p.data.copy_(p.data.bfloat16())
    save(made, Path(folder))
    lengths = [1, 2, 3, 5, 17, 31, 32, 33, 48, 63, 64, 65, 80, 100]
    asked = prompts(lengths, each=4) + [p * 3 for p in prompts([7, 25], 4, seed=1)]
    tokens, logprobs = greedy(made, asked, NEW_TOKENS)
    return Truth(folder, made, asked, tokens, logprobs)
