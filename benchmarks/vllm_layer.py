"""vLLM's gated delta layer by itself: its configuration, pages and metadata, without an engine.

``gpu_vllm.py`` uses it. None of vLLM's compiled ops is needed.
"""
# ruff: noqa: T201

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

STARTED = time.perf_counter()
PREFIX = "model.layers.0.linear_attn"
DRAFTS = 3
DTYPES = {"cuda": torch.bfloat16, "cpu": torch.float16}
"""Triton's interpreter truncates bfloat16."""
ABSENT = (
    "PIL", "aiohttp", "compressed_tensors", "fastapi", "llguidance", "openai", "openai_harmony",
    "prometheus_client", "uvloop", "xgrammar",
)  # fmt: skip
"""Packages that vLLM's modules import and the layer never uses: made up where they are missing."""
QUESTIONS = (
    "cutlass_scaled_mm_supports_fp8", "cutlass_scaled_mm_supports_block_fp8",
    "cutlass_group_gemm_supported", "cutlass_scaled_mm_supports_fp4",
)  # fmt: skip
"""Compiled ops that vLLM asks while its modules load; without them the answer is no."""


class Row(NamedTuple):
    """N sequences of T tokens each; of prompts, the last ``continued`` have a state already."""

    kind: str
    N: int
    T: int
    continued: int = 0

    @property
    def pages(self) -> int:
        """vLLM keeps a state for each draft token."""
        return self.N * (self.T if self.kind == "drafts" else 1)


ROWS = {
    "prefill 2048": Row("prefill", 1, 2048),
    "prefill 8192": Row("prefill", 1, 8192),
    "prefill 8x1024": Row("prefill", 8, 1024, 4),
    "decode 1": Row("decode", 1, 1),
    "decode 8": Row("decode", 8, 1),
    "decode 64": Row("decode", 64, 1),
    "decode 256": Row("decode", 256, 1),
    "drafts 64x4": Row("drafts", 64, 1 + DRAFTS),
}
SMALL = {
    "prefill 1x70": Row("prefill", 1, 70),
    "prefill 3x33": Row("prefill", 3, 33, 2),
    "decode 3": Row("decode", 3, 1),
    "drafts 2x4": Row("drafts", 2, 1 + DRAFTS),
}


def rows_of(device: str, names: str | None) -> dict[str, Row]:
    """All rows, or those of these names."""
    known = ROWS if device == "cuda" else SMALL
    return {n: known[n] for n in names.split(",")} if names else known


def say(text: str) -> None:
    print(f"[{time.perf_counter() - STARTED:6.1f} s] {text}", flush=True)


def failed(what: str) -> None:
    say(f"FAILED: {what}\n{traceback.format_exc()}")


# ----------------------------------------------------------------------- vLLM without compiled ops


class _Made(types.ModuleType):
    """A module in which every name is an empty class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {"__module__": self.__name__})
        setattr(self, name, made)
        return made


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Asked last, so a package that is installed stays itself."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname.split(".")[0] in ABSENT:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Made(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""


def load_vllm(device: str) -> None:
    """Import vLLM for CUDA, with or without its compiled ops."""
    sys.meta_path.append(_Absent())
    folder = Path(importlib.util.find_spec("vllm").origin).parent  # type: ignore[union-attr, arg-type]
    if not list(folder.glob("_C_stable_libtorch*.so")):
        ops = torch.library.Library("_C", "FRAGMENT")
        for name in QUESTIONS:
            ops.define(f"{name}(int capability) -> bool")
            ops.impl(name, lambda capability: False, "CompositeImplicitAutograd")
        compiled, attention = (
            _Made(f"vllm.{name}") for name in ("_C_stable_libtorch", "vllm_flash_attn")
        )
        compiled.kept = ops
        attention.is_fa_version_supported = lambda *_, **__: False
        attention.__path__ = []
        sys.modules |= {compiled.__name__: compiled, attention.__name__: attention}
    import vllm
    import vllm.platforms
    from vllm.platforms import cuda

    kind = cuda.CudaPlatform if device == "cuda" else _pretended(cuda.NonNvmlCudaPlatform)
    vllm.platforms._current_platform = kind()
    if device == "cpu":
        _for_the_interpreter()
    say(f"vLLM {vllm.__version__} from {folder}")


def _pretended(kind: Any) -> Any:
    """A CUDA platform whose device is this machine's CPU."""
    from vllm.platforms.interface import DeviceCapability

    answers = {
        "get_device_capability": lambda cls, device_id=0: DeviceCapability(9, 0),
        "get_device_name": lambda cls, device_id=0: "pretended",
        "get_device_total_memory": lambda cls, device_id=0: 1 << 37,
        "current_device": lambda cls: "cpu",
        "num_compute_units": lambda cls, device_id=0: 4,
    }
    made = {name: classmethod(answer) for name, answer in answers.items()}
    return type("Pretended", (kind,), {**made, "dispatch_key": "CPU"})


def _exp(x):  # type: ignore[no-untyped-def]
    return tl.exp(x)  # noqa: F821


def _exp2(x):  # type: ignore[no-untyped-def]
    return tl.exp2(x)  # noqa: F821


def _for_the_interpreter() -> None:
    """It finds only functions that kernels name as ``tl.exp``, and it cannot measure to tune."""
    import triton
    import triton.language
    from triton.runtime.autotuner import Autotuner

    torch_utils = importlib.import_module("vllm.utils.torch_utils")
    torch_utils.PIN_MEMORY = False  # type: ignore[attr-defined]
    globals()["tl"] = triton.language
    triton.language.exp, triton.language.exp2, own = (
        triton.jit(_exp),
        triton.jit(_exp2),
        (triton.language.exp, triton.language.exp2),
    )
    importlib.import_module("vllm.third_party.flash_linear_attention.ops.op")
    triton.language.exp, triton.language.exp2 = own

    def run(self: Any, *args: Any, **options: Any) -> Any:
        return self.fn.run(*args, **options, **self.configs[0].all_kwargs())

    Autotuner.run = run
    home = importlib.import_module("vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn")
    home.fla_chunk_gated_delta_rule = _chunks  # type: ignore[attr-defined]


def _chunks(q: Any, k: Any, v: Any, g: Any, beta: Any, **options: Any) -> Any:
    """In place of the kernels that the interpreter cannot run: those of prompts."""
    from sluice.testing.oracle import delta

    start, borders = options["initial_state"], options["cu_seqlens"]
    slots = torch.arange(len(start), dtype=torch.int32)
    rows = {"state": start, "slots": slots, "cu_seqlens": borders}
    o, after = delta(q[0], k[0], v[0], g[0], beta[0], **rows)
    return o[None].to(q.dtype), after.to(start.dtype)


def _interpreted(metadata: Any) -> None:
    """vLLM changes a launch's arguments while it counts programs, too late for the interpreter."""
    from triton.runtime import interpreter

    for blocks in (metadata.nums_dict or {}).values():
        for name in ("batch_ptr", "token_chunk_offset_ptr"):
            blocks[f"kept {name}"] = blocks[name]
            blocks[name] = interpreter._implicit_cvt(blocks[name])


def start_one_rank() -> None:
    """vLLM asks its process groups how many shards there are: one."""
    from vllm import distributed
    from vllm.config import VllmConfig, set_current_vllm_config

    folder = tempfile.mkdtemp()
    with set_current_vllm_config(VllmConfig()):
        distributed.init_distributed_environment(
            world_size=1, rank=0, local_rank=0, backend="gloo",
            distributed_init_method=f"file://{folder}/rendezvous",
        )  # fmt: skip
        distributed.initialize_model_parallel(1, 1)


# ------------------------------------------------------------------------------- layers and pages


class Side:
    """One layer of one side with its pages, and vLLM's metadata builder for it."""

    def __init__(self, name: str, drafts: int, pages: int, device: str) -> None:
        import torch
        from vllm.config import SpeculativeConfig, set_current_vllm_config
        from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn as home
        from vllm.utils.torch_utils import set_default_torch_dtype
        from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder

        self.name = name
        self.device = torch.device("cuda:0" if device == "cuda" else device)
        self.hf, self.dtype = text_config(device), DTYPES[device]
        self.config = engine_config(name, self.hf, self.dtype)
        if drafts:
            self.config.speculative_config = SpeculativeConfig(
                method="ngram", num_speculative_tokens=drafts
            )
        with (
            set_current_vllm_config(self.config),
            set_default_torch_dtype(self.dtype),
            self.device,
        ):
            self.layer: Any = home.QwenGatedDeltaNetAttention(
                self.hf, self.config, prefix=PREFIX, gqa_interleaved_layout=True
            )
        kind = type(self.layer).__name__
        if (kind == "SluiceGDN") != (name == "sluice"):
            raise RuntimeError(f"the layer of {name!r} is a {kind}")
        spec = self.layer.get_kv_cache_spec(self.config)
        self.raw = torch.zeros(pages * spec.page_size_bytes, dtype=torch.int8, device=self.device)
        self.conv, self.state = self.layer.kv_cache = page_views(self.raw, spec, pages)
        with set_current_vllm_config(self.config):
            self.builder = GDNAttentionMetadataBuilder(spec, [PREFIX], self.config, self.device)
        self.projections = {
            n: getattr(self.layer, n) for n in ("in_proj_qkvz", "in_proj_ba", "out_proj")
        }

    @contextlib.contextmanager
    def context(self, metadata: Any, tokens: int) -> Iterator[None]:
        """What vLLM's runner sets around a model's forward."""
        from vllm.forward_context import set_forward_context

        with set_forward_context({PREFIX: metadata}, self.config, num_tokens=tokens):
            yield

    @contextlib.contextmanager
    def core_alone(self, qkvz: Any, ba: Any) -> Iterator[None]:
        """In this scope the projections return what they were given."""
        made = {"in_proj_qkvz": _given(qkvz), "in_proj_ba": _given(ba), "out_proj": _given(None)}
        for name, module in made.items():
            setattr(self.layer, name, module)
        try:
            yield
        finally:
            for name, module in self.projections.items():
                setattr(self.layer, name, module)


def _given(value: Any) -> Any:
    class Given(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return (x if value is None else value), None

    return Given()


def text_config(device: str) -> Any:
    """Qwen3-Next's, in miniature for the interpreter."""
    from transformers import Qwen3NextConfig

    if device == "cuda":
        return Qwen3NextConfig()
    return Qwen3NextConfig(hidden_size=64, linear_num_key_heads=2, linear_num_value_heads=4)


def engine_config(name: str, hf: Any, dtype: torch.dtype) -> Any:
    """vLLM's configuration, with graphs for decode and without compilation."""
    from vllm.config import CompilationConfig, VllmConfig
    from vllm.config.compilation import CompilationMode, CUDAGraphMode

    backend = "flashinfer" if name == "vLLM FlashInfer" else "triton"
    made = VllmConfig(
        compilation_config=CompilationConfig(
            mode=CompilationMode.NONE, cudagraph_mode=CUDAGraphMode.FULL_DECODE_ONLY
        ),
        additional_config={"sluice": name == "sluice", "gdn_prefill_backend": backend},
    )
    made.compilation_config.max_cudagraph_capture_size = 1024
    made.scheduler_config.max_num_seqs = 256
    made.model_config = types.SimpleNamespace(
        dtype=dtype, hf_text_config=hf, hf_config=hf, is_moe=True
    )
    cache = made.cache_config
    cache.mamba_block_size = 16384
    cache.mamba_ssm_cache_dtype = "float32"
    heads, K, V = hf.linear_num_value_heads, hf.linear_key_head_dim, hf.linear_value_head_dim
    D = 2 * hf.linear_num_key_heads * K + heads * V
    needed = heads * K * V * 4 + (hf.linear_conv_kernel_dim - 1 + DRAFTS) * D * 2
    token = 2 * 2 * 256 * 2  # bytes of a token in the pages of Qwen3-Next's full attention
    cache.mamba_page_size_padded = -(-needed // (16 * token)) * 16 * token
    return made


def page_views(raw: Any, spec: Any, pages: int) -> tuple[Any, ...]:
    """The two states of every page, as vLLM's runner cuts them out of its memory."""
    made, offset = [], 0
    for size, dtype in zip(spec.shapes, spec.dtypes, strict=True):
        flat, inner = raw.view(dtype), torch.empty(size, device="meta").stride()
        stride = (spec.page_size_bytes // dtype.itemsize, *inner)
        made.append(flat.as_strided((pages, *size), stride, offset // dtype.itemsize))
        offset += dtype.itemsize * torch.Size(size).numel()
    return tuple(made)


def fill(sides: list[Side]) -> None:
    """The same random weights and pages for all sides."""
    first, draw = sides[0], torch.Generator(sides[0].device).manual_seed(0)
    for name, p in first.layer.named_parameters():
        if name == "A_log":
            p.data.uniform_(0.05, 4.0, generator=draw).log_()
        elif name == "norm.weight":
            p.data.normal_(1.0, 0.1, generator=draw)
        elif name == "dt_bias":
            p.data.uniform_(-4.0, -1.0, generator=draw)
        else:
            scale = 0.5 if name == "conv1d.weight" else p.shape[-1] ** -0.5
            p.data.normal_(0.0, scale, generator=draw)
    for pool, scale in ((first.conv, 1.0), (first.state, 0.1)):
        pool.copy_(torch.empty_like(pool).normal_(0.0, scale, generator=draw))
    for other in sides[1:]:
        other.layer.load_state_dict(first.layer.state_dict())
        other.raw.copy_(first.raw)


# ----------------------------------------------------------------------------------------- batches


class Batch(NamedTuple):
    """A row's inputs: which pages (0 is padding) and how many draft tokens were kept before."""

    row: Row
    hidden: Any
    table: Any
    accepted: Any

    def metadata(self, side: Side) -> Any:
        """By vLLM's builder."""
        import torch
        from vllm.v1.attention.backend import CommonAttentionMetadata

        N, T = self.row.N, self.row.T
        borders = torch.arange(N + 1, dtype=torch.int32) * T
        known = torch.zeros(N, dtype=torch.int32)
        if self.row.kind == "prefill":
            known[N - self.row.continued :] = 64 if self.row.continued else 0
        else:
            known += 64
        options: dict[str, Any] = {}
        if self.row.kind == "drafts":
            drafts = torch.full((N,), T - 1, dtype=torch.int32)
            options = {
                "num_accepted_tokens": self.accepted,
                "num_decode_draft_tokens_cpu": drafts,
            }
        common = CommonAttentionMetadata(
            query_start_loc=borders.to(side.device),
            query_start_loc_cpu=borders,
            seq_lens=(known + T).to(side.device),
            num_reqs=N,
            num_actual_tokens=N * T,
            max_query_len=T,
            max_seq_len=int(known.max()) + T,
            block_table_tensor=self.table,
            slot_mapping=torch.arange(N * T, device=side.device),
        )
        made = side.builder.build(0, common, **options)
        if side.device.type == "cpu":
            _interpreted(made)
        return made

    def has_state(self) -> list[bool]:
        row = self.row
        return [row.kind != "prefill" or n >= row.N - row.continued for n in range(row.N)]


def batch_of(row: Row, side: Side, pages: int) -> Batch:
    draw = torch.Generator().manual_seed(1)
    columns = row.T if row.kind == "drafts" else 1
    blocks = 1 + torch.randperm(pages - 1, generator=draw)[: row.N * columns]
    accepted = torch.randint(1, row.T + 1, (row.N,), generator=draw, dtype=torch.int32)
    hidden = torch.randn(row.N * row.T, side.hf.hidden_size, generator=draw)
    return Batch(
        row,
        hidden.to(side.dtype).to(side.device),
        blocks.view(row.N, columns).to(torch.int32).to(side.device),
        accepted.to(side.device),
    )
