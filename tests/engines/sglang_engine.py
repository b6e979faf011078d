"""SGLang's whole engine on a CPU, in processes of its own.

``python -m tests.engines.sglang_engine FILE`` reads what is asked from the file (JSON: the model's
folder, the engine's options, and rounds of prompts) and writes into it what was answered.

SGLang's wheel has kernels for GPUs only. Triton's interpreter runs those that are Triton's; it has
no block pointers, so plain torch takes the place of the gated norm. SGLang is told that the extra
buffer of its radix cache is possible here, and to use its Triton kernels for drafts, as on another
maker's GPU. The plug-in's operators are the CPU's. SGLang's scheduler, radix cache, pools, drafts,
attention, experts and sampling are its own. SGLang starts processes that import this file anew,
with ``test_sglang_engine.ENVIRONMENT``.
"""
# ruff: noqa: E402

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.engines.no_torchvision import without_torchvision

without_torchvision()

import torch
from sglang.kernels.ops.attention.fla import fused_norm_gate
from sglang.kernels.ops.speculative import spec_tree
from sglang.srt.arg_groups import mamba_hook
from torch import Tensor

from sluice.backends import triton
from sluice.backends.cpu.kernel import Kernel
from tests import interpreter
from tests.engines.sglang_log import ASKED, READY


def norm(x: Tensor, z: Tensor, weight: Tensor, bias: None, activation: str, **more: Any) -> Tensor:
    """SGLang's function of the gated norm."""
    assert bias is None
    assert activation in ("swish", "silu")
    y = x.square().mean(-1, keepdim=True).add(more["eps"]).rsqrt() * x * weight
    return y * torch.nn.functional.silu(z)


def pageable(x: Tensor) -> Tensor:
    """``Tensor.pin_memory`` where there is nobody to pin it for."""
    return x


def nothing() -> None:
    """``torch.cuda.synchronize`` without a GPU."""


load = Kernel._load_or_compile


def told(kernel: Kernel) -> int:
    """``Kernel._load_or_compile``, in whichever process: compiled, or taken from the disk."""
    sys.stderr.write(f"{READY} {kernel.name}\n")
    return load(kernel)


Kernel._load_or_compile = told
interpreter.hasten()
torch.cuda.synchronize = nothing
Tensor.pin_memory = pageable
triton.DEVICES = ("cuda",)
fused_norm_gate.rms_norm_gated = norm
mamba_hook._platform_supports_mamba_cache_extra_buffer = lambda: True
spec_tree._is_xpu = True

OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "linear_attn_decode_backend": "sluice",
    "linear_attn_prefill_backend": "sluice",
    "mem_fraction_static": 0.3,
    "max_total_tokens": 8192,
    "max_mamba_cache_size": 64,
    "context_length": 512,
    "watchdog_timeout": 3000,
    "log_level": "info",
}


def main(file: Path) -> None:
    import sglang

    asked = json.loads(file.read_text())
    engine = sglang.Engine(model_path=asked["folder"], **OPTIONS | asked["options"])
    params = {"temperature": 0, "max_new_tokens": asked["new"], "ignore_eos": True}
    rounds = []
    for i, prompts in enumerate(asked["rounds"]):
        sys.stderr.write(f"{ASKED} {i}\n")
        sys.stderr.flush()
        outs = engine.generate(input_ids=prompts, sampling_params=params)
        rounds.append([{"tokens": o["output_ids"], **o["meta_info"]} for o in outs])
    file.write_text(json.dumps(rounds))
    engine.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
