"""vLLM's own Triton kernels, in Triton's interpreter.

With drafts and a prefix cache, vLLM copies states between blocks by two kernels for which its CPU
build has no other form. Here the file that defines them is loaded once more, with a Triton that
interprets, and vLLM calls those.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from types import ModuleType
from unittest import mock

import triton
import triton.language as tl
from vllm import triton_utils
from vllm.v1.worker import mamba_utils

from tests import interpreter

KERNELS = ("precopy_mamba_align_fused_kernel", "postprocess_mamba_fused_kernel")


@contextlib.contextmanager
def copied_states() -> Iterator[None]:
    """Within this scope an engine may have drafts and a prefix cache on a CPU."""
    interpreter.hasten()
    with contextlib.ExitStack() as undo:
        with mock.patch.object(triton.knobs.runtime, "interpret", True):
            copies = _loaded_with_triton(mamba_utils)
            for name in KERNELS:
                undo.enter_context(mock.patch.object(mamba_utils, name, getattr(copies, name)))
            undo.enter_context(mock.patch.object(tl, "cdiv", triton.jit(tl.cdiv.fn)))
        # programs that share the copy of one state: one is enough, and each takes its time
        undo.enter_context(mock.patch.object(mamba_utils, "_TEMPORAL_TILES", 1))
        yield


def _loaded_with_triton(home: ModuleType) -> ModuleType:
    """The module once more. On a CPU vLLM puts a stand-in where it imports Triton from."""
    spec = importlib.util.spec_from_file_location(f"interpreted_{home.__name__}", home.__file__)
    made = importlib.util.module_from_spec(spec)
    with (
        mock.patch.multiple(triton_utils, triton=triton, tl=tl),
        mock.patch.dict("sys.modules", {spec.name: made}),
    ):
        spec.loader.exec_module(made)
    return made
