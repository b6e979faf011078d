"""Launching: the device, the strides, and the options every kernel shares.

``launch`` says everything anew in every call. A :class:`Plan` says it once for a problem that comes
again and again, as in decode: then only addresses are filled in.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
import triton
from torch import Tensor
from triton.compiler import CompiledKernel

from sluice.backends.triton.configs import Config
from sluice.contract.problem import Problem

INDICES = ["slots_ptr", "write_slots_ptr", "has_state_ptr", "cu_seqlens_ptr"]
INDICES += ["checkpoint_slots_ptr", "checkpoint_positions_ptr"]
"""Pointers that are often slices of a scheduler's tensors and begin anywhere: no kernel is compiled
for whether they are multiples of 16 (``do_not_specialize_on_alignment``)."""
GATES = ["g_ptr", "beta_ptr", "A_log_ptr", "dt_bias_ptr"]
"""The same of gates per head, a few numbers a token."""

_compile_only: ContextVar[Share | None] = ContextVar("sluice_compile_only", default=None)
_every_plan: ContextVar[bool] = ContextVar("sluice_every_plan", default=False)
_HERE: AbstractContextManager[None] = nullcontext()


def launch(
    kernel: Any, programs: int, config: Config, device: torch.device, **arguments: Any
) -> None:
    """Run ``programs`` programs (a grid of one dimension: x alone may pass 65,535) on ``device``.

    A grid of none launches nothing.
    """
    if programs == 0:
        return
    with _on(device):
        run(kernel, programs, arguments, _options(config, device))


def _options(config: Config, device: torch.device) -> dict[str, Any]:
    """What of a configuration is an option of the compiler or of the launch."""
    options = {
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        "enable_fp_fusion": config.fp_fusion,
    }
    if config.maxnreg is not None and torch.version.hip is None:
        options["maxnreg"] = config.maxnreg
    if device.type == "cuda" and torch.version.hip is None:
        options["launch_pdl"] = _overlaps(device)
    return options


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """A scope in which ``device`` is the current one."""
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        return torch.cuda.device(device)
    return _HERE


@functools.cache
def _overlaps(device: torch.device) -> bool:
    """Whether the GPU can launch a kernel while the one before it ends (see ``tiles.begin``)."""
    return torch.cuda.get_device_capability(device) >= (9, 0)


def run(kernel: Any, programs: int, arguments: dict[str, Any], options: dict[str, Any]) -> Any:
    """The launch itself, apart so that tests can take its arguments and compile for any GPU.

    Returns what Triton does: the compiled kernel, or None where it is interpreted.
    """
    if (share := _compile_only.get()) is not None:
        mine = share.has(kernel, arguments)
        return kernel.warmup(**arguments, **options, grid=(programs,)) if mine else None
    return kernel[(programs,)](**arguments, **options)


class Plan:
    """A problem's launch, worked out once; a call of it brings the tensors alone.

    A plan belongs to one problem object, and the very same problem has the same shapes, strides,
    dtypes, device and options (library.py), so everything but the addresses is the plan's. The
    first call goes through Triton, which binds the arguments, compiles, and returns the compiled
    kernel; later ones hand addresses to that kernel. Of addresses a kernel knows one thing, that
    they are multiples of 16 where its signature says so: a call with others goes through Triton
    again, and so does every call while a Triton setting that changes kernels is on.

    Args:
        kernel: its first parameters are the pointers.
        programs: the grid. config, device: as for :func:`launch`.
        tensors: the pointers of the first call, in the kernel's order; None where not given.
        read_dense: names of pointers whose tensors are read with stride 1, and copied if need be.
        arguments: all other parameters, by name.
    """

    def __init__(
        self,
        kernel: Any,
        programs: int,
        config: Config,
        device: torch.device,
        tensors: Sequence[Tensor | None],
        read_dense: Sequence[str] = (),
        **arguments: Any,
    ) -> None:
        names = kernel.arg_names
        self.kernel, self.programs, self.device = kernel, programs, device
        self.names, self.arguments = names[: len(tensors)], arguments
        self.values = tuple(arguments[name] for name in names[len(tensors) :])
        self.options = _options(config, device)
        self.copied = {
            i
            for i, (name, x) in enumerate(zip(self.names, tensors, strict=True))
            if name in read_dense and x is not None and not x.is_contiguous()
        }
        params = getattr(kernel, "params", ())[: len(tensors)]  # none where it is interpreted
        self.aligned = tuple(
            i
            for i, param in enumerate(params)
            if tensors[i] is not None and not param.do_not_specialize_on_alignment
        )
        self.compiled: Callable[..., None] | None = None

    def __call__(self, *tensors: Tensor | None) -> None:
        """Launch; ``tensors`` as those the plan was made from, somewhere else."""
        if self.programs == 0:
            return
        if self.copied:
            tensors = tuple(dense(x) if i in self.copied else x for i, x in enumerate(tensors))
        with _on(self.device):
            self._launch(tensors)

    def _launch(self, tensors: Sequence[Tensor | None]) -> None:
        addresses = [None if x is None else x.data_ptr() for x in tensors]
        usual = not (_compile_only.get() is not None or _unusual(self.kernel))
        for i in self.aligned:
            usual = usual and not addresses[i] % 16
        if usual and self.compiled is not None:
            self.compiled(*addresses, *self.values)
            return
        arguments = dict(zip(self.names, tensors, strict=True)) | self.arguments
        compiled = run(self.kernel, self.programs, arguments, self.options)
        # other GPUs' kernels know more of a tensor than its address
        if usual and isinstance(compiled, CompiledKernel) and _is_cuda(compiled):
            self.compiled = compiled[(self.programs, 1, 1)]


def _unusual(kernel: Any) -> bool:
    """Whether something is on that Triton asks for at a launch, before it chooses the kernel."""
    runtime, compilation = triton.knobs.runtime, triton.knobs.compilation
    return bool(
        runtime.debug
        or compilation.instrumentation_mode
        or getattr(runtime, "add_stages_inspection_hook", None)
        or getattr(kernel, "pre_run_hooks", None)
    )


def _is_cuda(compiled: CompiledKernel) -> bool:
    return compiled.metadata.target.backend == "cuda"


_plans: dict[int, tuple[Problem, Plan]] = {}
_MOST_PLANS = 1024


def plan_of(p: Problem, make: Callable[..., Plan], *arguments: Any) -> Plan:
    """The plan of this very problem, made by ``make(p, *arguments)`` when it comes first."""
    known = _plans.get(id(p))
    if known is None or known[0] is not p:
        if len(_plans) >= _MOST_PLANS:
            _plans.clear()
        known = _plans[id(p)] = (p, make(p, *arguments))
    return known[1]


def forget() -> None:
    """Plan every launch anew: for tests and sweeps, which change the tables of configs.py."""
    _plans.clear()


class Share:
    """Which kernels one of several processes compiles: every ``of``-th, from ``number`` on."""

    def __init__(self, number: int = 0, of: int = 1) -> None:
        self.number, self.of = number, of
        self.known: dict[Any, int] = {}

    def has(self, kernel: Any, arguments: dict[str, Any]) -> bool:
        """Whether this process compiles it; counted in the order in which kernels come."""
        if self.of == 1:
            return True
        constants = {p.name for p in kernel.params if p.is_constexpr}
        told = (f"{n}={x}" for n, x in arguments.items() if x is None or n in constants)
        at = self.known.setdefault((kernel, *told), len(self.known))
        return at % self.of == self.number


@contextmanager
def compiling(calls: Iterable[Callable[[], Any]], share: Share | None = None) -> Iterator[None]:
    """Make these calls without launching anything; their kernels compile on all cores meanwhile.

    What is called within the scope waits for its own kernels alone, and it is there that one which
    does not compile raises. With a Triton that cannot compile aside, kernels are compiled there,
    one after the other; in a scope within another, of Triton's own or this, by that one. With a
    ``share`` the others' kernels are left to them.
    """
    aside = getattr(triton, "AsyncCompileMode", None)
    active = getattr(aside and importlib.import_module(aside.__module__), "active_mode", None)
    if aside is None or active is None or active.get() is not None:
        yield
        return
    try:
        with ThreadPoolExecutor() as pool, aside(pool, ignore_errors=True):
            token = _compile_only.set(share or Share())
            try:
                for call in calls:
                    call()
            finally:
                _compile_only.reset(token)
            yield
    finally:
        active.set(None)  # Triton 3.6 does not where its scope ends in an exception of its own


@contextmanager
def warming(calls: Iterable[Callable[[], Any]], share: Share | None = None) -> Iterator[None]:
    """``compiling``, for calls that stand for others of any size: see ``every_plan``."""
    token = _every_plan.set(True)
    try:
        with compiling(calls, share):
            yield
    finally:
        _every_plan.reset(token)


def every_plan() -> bool:
    """Whether a call is to run by each of the plans that calls of other sizes have."""
    return _every_plan.get()


def strides(x: Tensor | None, name: str, dims: str) -> dict[str, int]:
    """``stride_<name>_<d>`` for the leading dimensions of x.

    0 along a batch of one: the step over a long packed row would not fit into 32 bits, and with one
    that does not Triton compiles another kernel.
    """
    steps = (0,) * len(dims) if x is None else x.stride()
    if x is not None and dims[0] == "b" and x.shape[0] == 1:
        steps = (0, *steps[1:])
    return {f"stride_{name}_{d}": step for d, step in zip(dims, steps, strict=False)}


def dense(x: Tensor | None) -> Tensor | None:
    """Index tensors and small parameters are read with stride 1; nearly always they have it."""
    return x if x is None or x.is_contiguous() else x.contiguous()
