"""A bound call: its kernels, ready to be launched once addresses are known.

:class:`Launches` is what ``bind`` returns. On an NVIDIA GPU ``bind`` loads the kernels, which come
compiled (shipped.py) or are compiled by Triton (compiler.py), and every call hands addresses to the
CUDA driver. In Triton's interpreter, on other GPUs, and while a Triton setting is on that changes
launches, Triton launches the kernels itself.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sluice import torch_private
from sluice.backends import cuda_driver
from sluice.backends.triton import shipped, variants
from sluice.backends.triton.arguments import Binding, KernelCall, Pointer, Tiles
from sluice.backends.triton.shipped import MachineCode
from sluice.contract.spec import Spec

_FORMATS = {"fp32": "f", "i32": "i", "i64": "q"}
_HERE: AbstractContextManager[None] = nullcontext()
COUNTERS = "counters"
_PRIVATE = "sluice.backends.triton.triton_private"
SWIZZLE = 128  # bytes: a tile in shared memory is at least so wide
_log = logging.getLogger("sluice")


class Launches:
    """The kernels of one call, in order, and the memory they share."""

    def __init__(
        self, spec: Spec, binding: Binding, calls: Sequence[KernelCall], zeros: str | None = None
    ) -> None:
        self.spec, self.device = spec, spec.device
        self._zeros = None if zeros is None else spec.TENSORS.index(zeros)
        self.calls = [call for call in calls if call.programs > 0]
        self._copies = [(spec.TENSORS.index(n), meta) for n, meta in binding.copies.items()]
        self._workspace, self._workspace_bytes = binding.workspace, binding.workspace_bytes
        self._offsets = [offset for offset, _, _ in binding.workspace.values()]
        self._counters = binding.counters
        kept = getattr(spec, "kept", None) is not None  # by the first of two passes, for the second
        self._kept = spec.TENSORS.index("kept") if kept else None
        names = [*spec.TENSORS, *([COUNTERS] if self._counters else []), *binding.workspace]
        self._place = {name: i for i, name in enumerate(names)}
        self._shifted: list[tuple[int, int]] = []
        self._checked = self._alignments()
        self._special = bool(self._copies) or zeros is not None
        self.watchful = not self._special  # else something is written before addresses are known
        self.watch: Callable[[Sequence[int]], None] | None = None
        self._index = self.device.index or 0
        self._ready: dict[frozenset[str], list[Any]] = {}
        self._usual: list[Any] | None = None
        self._hooks: list[list[Any]] = []

    def _alignments(self) -> list[int]:
        """Places of the tensors whose alignment some kernel is specialised on."""
        found = set()
        for call in self.calls:
            for name, _, _, unaligned in variants.parameters(call.kernel):
                value = call.arguments[name]
                if isinstance(value, Pointer) and not unaligned:
                    found.add(value.source)
        return sorted(self._place[name] for name in found if name in self.spec.TENSORS)

    def bound(self) -> Launches:
        """The same, compiled and loaded where the CUDA driver launches it."""
        private = _triton_private()
        kernels = [call.kernel.imported for call in self.calls]
        own = private is not None and any(map(private.launches_itself, kernels))
        if self._by_driver() and not own:
            with self._on_device():
                self._usual = self._prepare(frozenset())
        imported = [k for call in self.calls if (k := call.kernel.imported) is not None]
        self._hooks = [getattr(kernel, "pre_run_hooks", []) for kernel in imported]
        return self

    def codes(self) -> list[str]:
        """Of each kernel, whether it comes compiled: "shipped" or "compiled"."""
        found = [shipped.serves(variants.variant(c).key, self.device) for c in self.calls]
        return ["shipped" if ready else "compiled" for ready in found]

    def aligned(self) -> list[str]:
        """Tensors that must begin at a multiple of 16 bytes where nothing can be compiled."""
        return [self.spec.TENSORS[i] for i in self._checked]

    def _by_driver(self) -> bool:
        return self.device.type == "cuda" and torch.version.hip is None

    def _on_device(self) -> AbstractContextManager[Any]:
        """A scope in which the call's device is the current one."""
        if self.device.type == "cuda" and self.device.index not in (
            None,
            torch.cuda.current_device(),
        ):
            return torch.cuda.device(self.device)
        return _HERE

    def __call__(self, tensors: Sequence[Tensor | None]) -> None:
        """Launch the kernels on these tensors, in the order of the spec."""
        if self._special:
            tensors = self._specially(tensors)
        if not self.calls:
            return
        counters = None if self._counters is None else self._counters(tensors)
        workspace = None
        if self._kept is not None:
            workspace = tensors[self._kept]
            assert workspace is not None
            workspace.resize_(self._workspace_bytes)
        elif self._workspace_bytes:
            workspace = torch.empty(self._workspace_bytes, dtype=torch.uint8, device=self.device)
        if self._usual is None and self._by_driver():
            self.bound()  # a setting under which Triton launches may be off again
        private = _triton_private()
        if self._usual is None or (private is not None and private.changed()) or any(self._hooks):
            with self._on_device():
                self._through_triton(tensors, counters, workspace)
        elif torch.cuda.current_device() == self._index:
            self._through_driver(tensors, counters, workspace)
        else:
            with torch.cuda.device(self._index):
                self._through_driver(tensors, counters, workspace)

    def _specially(self, tensors: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """The tensors as kernels read them: without gaps where they must have none."""
        tensors = list(tensors)
        for i, meta in self._copies:
            x = tensors[i]
            assert x is not None
            tensors[i] = x.as_strided(meta.shape, meta.strides).contiguous()
        if self._zeros is not None:
            out = tensors[self._zeros]
            assert out is not None
            out.zero_()
        return tensors

    def _through_driver(
        self, tensors: Sequence[Tensor | None], counters: Tensor | None, workspace: Tensor | None
    ) -> None:
        addresses = [0 if x is None else x.data_ptr() for x in tensors]
        if self.watch is not None:
            self.watch(addresses)
        bits = 0
        for i in self._checked:
            bits |= addresses[i]
        launches = self._usual
        if bits & 15:
            names = self.spec.TENSORS
            misplaced = frozenset(names[i] for i in self._checked if addresses[i] % 16)
            launches = self._ready.get(misplaced) or self._prepare(misplaced)
        if counters is not None:
            addresses.append(counters.data_ptr())
        if workspace is not None:
            base = workspace.data_ptr()
            addresses += [base + offset for offset in self._offsets]
        if self._shifted:
            addresses += [addresses[i] + offset for i, offset in self._shifted]
        stream = torch_private.current_stream(self._index)
        assert launches is not None
        for launch, pointers, matrices in launches:
            launch(pointers(addresses), matrices(addresses), stream)

    def _prepare(self, misplaced: frozenset[str]) -> list[Any]:
        """Compile, load, and lay out the parameters of every kernel."""
        needed = [variants.variant(call, misplaced) for call in self.calls]
        codes = _loaded(needed, self.device)
        self._ready[misplaced] = [
            self._prepared(call, code) for call, code in zip(self.calls, codes, strict=True)
        ]
        return self._ready[misplaced]

    def _prepared(self, call: KernelCall, code: _Code) -> Any:
        arguments, pointers, places = call.arguments, [], []
        matrices, numbers = [], []
        for name, kind in code.given:
            value = arguments[name]
            if kind == "pointer":
                pointers.append(self._where(value))
            elif kind == "matrix":
                places.append(self._place[value.source])
                matrices.append(_matrix(value, code.boxes[len(matrices)]))
                numbers += [*value.shape, *value.strides]
            else:
                numbers.append(value)
        launch = cuda_driver.KernelLaunch(
            code.function,
            code.name,
            call.programs,
            code.threads,
            code.shared,
            bool(call.options.get("launch_pdl")),
            code.layout,
            (*numbers, 0, 0),
            matrices,
        )
        return launch, _picker(pointers), _picker(places)

    def _where(self, pointer: Pointer) -> int:
        place = self._place[pointer.source]
        if not pointer.offset:
            return place
        if (place, pointer.offset) not in self._shifted:
            self._shifted.append((place, pointer.offset))
        return len(self._place) + self._shifted.index((place, pointer.offset))

    def _through_triton(
        self, tensors: Sequence[Tensor | None], counters: Tensor | None, workspace: Tensor | None
    ) -> None:
        if self.watch is not None:
            self.watch([0 if x is None else x.data_ptr() for x in tensors])
        memory: dict[str, Any] = dict(zip(self.spec.TENSORS, tensors, strict=True))
        memory[COUNTERS] = counters
        for name, (offset, shape, dtype) in self._workspace.items():
            assert workspace is not None
            size = torch.Size(shape).numel() * dtype.itemsize
            memory[name] = workspace[offset : offset + size].view(dtype)
        for call in self.calls:
            given = {n: _argument(memory, x) for n, x in call.arguments.items()}
            call.kernel.function[(call.programs,)](**given, **call.options)


def _picker(places: list[int]) -> Callable[[list[int]], tuple[int, ...]]:
    """A function that takes these places of a list, as a tuple."""
    if len(places) > 1:
        return itemgetter(*places)
    if not places:
        return lambda addresses: ()
    place = places[0]
    return lambda addresses: (addresses[place],)


def _triton_private() -> Any | None:
    """What changes Triton's launches, if this process uses Triton at all."""
    if sys.modules.get("triton") is None:
        return None
    return sys.modules.get(_PRIVATE) or _import_private()


def _import_private() -> Any:
    from sluice.backends.triton import triton_private

    return triton_private


def _argument(memory: dict[str, Any], value: Any) -> Any:
    """An argument as Triton's own launcher takes it."""
    if isinstance(value, Tiles):
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        base = memory[value.source]
        shape, strides, block = list(value.shape), list(value.strides), list(value.block)
        layout = _import_private().tile_layout(value.dtype, value.block)
        return TensorDescriptor(base, shape, strides, block, layout)
    if not isinstance(value, Pointer):
        return value
    x = memory[value.source]
    if not value.offset:
        return x
    return x.as_strided((1,), (1,), x.storage_offset() + value.offset // x.element_size())


def _matrix(tiles: Tiles, box: tuple[int, int]) -> cuda_driver.Matrix:
    (rows, columns), (stride, _) = tiles.shape, tiles.strides
    return cuda_driver.Matrix(tiles.dtype, rows, columns, stride, box, SWIZZLE)


class _Code(NamedTuple):
    """Machine code on a device, and what it is launched with."""

    function: int
    name: str
    threads: int
    shared: int
    layout: cuda_driver.Layout
    given: list[tuple[str, str]]  # parameters that are no constants, and their kinds
    boxes: list[tuple[int, int]]  # of the TMA descriptors, in order


_codes: dict[tuple[variants.Variant, int], _Code] = {}


def _loaded(needed: Sequence[variants.Variant], device: torch.device) -> list[_Code]:
    """Machine code of these variants on a device, where it was loaded or is now."""
    index = device.index or 0
    missing = list(dict.fromkeys(v for v in needed if (v, index) not in _codes))
    if missing:
        for v, code in zip(missing, _machine_codes(missing, device), strict=True):
            _codes[v, index] = _load(v, code, device)
    return [_codes[v, index] for v in needed]


def _machine_codes(
    needed: Sequence[variants.Variant], device: torch.device
) -> Iterable[MachineCode]:
    """Machine code that comes compiled, and the rest from Triton, which compiles side by side."""
    ready = {v: code for v in needed if (code := shipped.code(v.key, device)) is not None}
    missing = [v for v in needed if v not in ready]
    if missing:
        from sluice.backends.triton import compiler

        _say_compiling(missing[0].kernel.name, device)
        for v, kernel in zip(missing, compiler.compiled(missing, device), strict=True):
            ready[v] = compiler.machine_code(kernel)
    return [ready[v] for v in needed]


@functools.cache
def _said() -> list[str]:
    """What was said of kernels that do not come compiled, once per process."""
    return []


def _say_compiling(name: str, device: torch.device) -> None:
    kernels = shipped.installed()
    if kernels is None or _said():
        return
    _said().append(name)
    _log.warning(
        "sluice compiles %s for %s now: this form of it is not among the compiled kernels. Other "
        "such kernels compile at their first use without a word; `sluice warmup` does it ahead.",
        name,
        torch.cuda.get_device_name(device),
    )


def compile_and_load(
    calls: Iterable[tuple[KernelCall, torch.device]],
    share: tuple[int, int] = (0, 1),
    progress: Callable[[str, int, int], None] | None = None,
) -> None:
    """Compile what these launches need, and load it unless other processes compile a share."""
    calls = [(call, device) for call, device in calls if call.programs > 0]
    missing = [
        (call, device)
        for call, device in calls
        if not shipped.serves(variants.variant(call).key, device)
    ]
    if missing:
        from sluice.backends.triton import compiler

        compiler.compile_all(missing, share, progress)
    if share == (0, 1) and torch.version.hip is None:
        for call, device in calls:
            with torch.cuda.device(device):
                _loaded([variants.variant(call)], device)


def _load(needed: variants.Variant, code: MachineCode, device: torch.device) -> _Code:
    given, kinds = [], []
    for parameter in needed.parameters:
        if parameter.kind == variants.CONSTANT:
            continue
        if parameter.kind.startswith(variants.TILES):
            given.append((parameter.name, "matrix"))
            kinds += ["matrix", "i", "i", "q", "q"]  # itself, its shape, its strides
        else:
            kind = "pointer" if parameter.kind[0] == "*" else _FORMATS[parameter.kind]
            given.append((parameter.name, kind))
            kinds.append(kind)
    kinds += ["q", "q"]  # Triton's scratch memory, which no kernel here asks for
    function = cuda_driver.load(code.cubin, code.name, code.shared, device)
    layout = cuda_driver.Layout(kinds)
    threads = 32 * code.num_warps
    return _Code(function, code.name, threads, code.shared, layout, given, list(code.boxes))
