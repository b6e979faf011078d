"""StatePool: conv and recurrent state of all gated delta layers of a model, addressed by slot.

A sequence has one slot, the same in every layer. The pool allocates and frees slots, copies them
(fork), and moves them out and in (snapshot, restore, save, load). Operators read and write the
pool's memory directly: ``decode(..., state=pool.layer(i)[1], slots=pool.indices(mine))``. Storage
is allocated once and never moves, so CUDA graphs may hold its addresses; copies are queued on the
current stream.

A call that is refused changes nothing: the pool, its slots and their contents stay as they were.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, SupportsIndex

import torch

from sluice.contract import arguments
from sluice.contract.errors import ContractError
from sluice.contract.names import ConvOrder, StateLayout
from sluice.contract.require import FLOATS
from sluice.ops.drafts import DraftBuffers
from sluice.slots import (
    DoubleFreeError,
    PoolExhaustedError,
    Slot,
    SlotBook,
    Slots,
    UseAfterFreeError,
)
from sluice.state_files import MissingDependencyError, PoolError
from sluice.state_geometry import (
    GeometryError,
    Model,
    PoolGeometry,
    StateSnapshot,
    check_options,
    geometry_of,
    header,
    parse_bytes,
    runs,
)

__all__ = [
    "DoubleFreeError",
    "GeometryError",
    "MissingDependencyError",
    "PoolError",
    "PoolExhaustedError",
    "PoolGeometry",
    "Slot",
    "StatePool",
    "StateSnapshot",
    "UseAfterFreeError",
    "parse_bytes",
]


class StatePool:
    """Conv and recurrent state of every linear layer, for ``slots`` sequences.

    Storage is one tensor per kind, ``conv [layers, slots, D, L]`` and ``recurrent [layers, slots,
    HV, V, K]``, zero at first. ``state_layout="kv"`` stores ``[.., K, V]`` instead, and
    ``conv_order="ld"`` keeps channels contiguous in memory (as vLLM does); the shape stays
    ``[.., D, L]``. With ``reserve_slot_0`` row 0 is never allocated, and operators need
    ``pad_slot=pool.pad_slot``. ``device`` defaults to the CPU.

    A slot is zeroed when it is allocated, not when it is freed, and the CUDA stream that gets it
    waits for the one that freed it. So neither a late write nor a NaN of the last owner reaches the
    next. ``has_state=False`` on a sequence's first call gives the same numbers without reading.

    One lock guards every method, copies included; operators do not take it. Raises
    ``ContractError`` for an argument that cannot be served.

    >>> pool = StatePool(PoolGeometry(layers=2, num_v_heads=4, conv_channels=96, head_k_dim=8,
    ...                               head_v_dim=16, conv_dtype=torch.float32), slots=8)
    >>> first, second = pool.allocate(2)
    >>> conv, recurrent = pool.layer(0)
    >>> conv.shape, recurrent.shape
    (torch.Size([8, 96, 3]), torch.Size([8, 4, 16, 8]))
    >>> recurrent[first] = 1.0
    >>> child, = pool.fork(first)
    >>> pool.free([first, second])
    >>> pool.indices(child), float(recurrent[child].sum()), pool.available
    (tensor([2]), 512.0, 7)
    >>> pool.free(first)
    Traceback (most recent call last):
        ...
    sluice.slots.DoubleFreeError: free: expected allocated slots, got slot 0, which is free
    """

    def __init__(
        self,
        geometry: PoolGeometry,
        slots: int,
        *,
        state_layout: StateLayout = "vk",
        conv_order: ConvOrder = "dl",
        device: torch.device | str = "cpu",
        reserve_slot_0: bool = False,
    ) -> None:
        arguments.instance("StatePool", "geometry", geometry, PoolGeometry, "a PoolGeometry")
        check_options(slots, state_layout, conv_order, reserve_slot_0)
        device = arguments.present("StatePool", device)
        conv_tail, state_tail = list(geometry.conv_shape), list(geometry.state_shape)
        if conv_order == "ld":
            conv_tail.reverse()
        if state_layout == "kv":
            state_tail[1:] = state_tail[:0:-1]
        lead = (geometry.layers, slots)
        with torch.inference_mode(False):  # an inference tensor could not be written outside
            conv = torch.zeros(*lead, *conv_tail, dtype=geometry.conv_dtype, device=device)
            state = torch.zeros(*lead, *state_tail, dtype=geometry.state_dtype, device=device)
        self._bind(geometry, [(conv, state)], state_layout, conv_order, reserve_slot_0)

    @classmethod
    def for_model(
        cls,
        model: Model,
        slots: int,
        *,
        tp: int = 1,
        conv_columns: int | None = None,
        state_dtype: torch.dtype = torch.float32,
        conv_dtype: torch.dtype | None = None,
        tag: str = "",
        **storage: Any,
    ) -> StatePool:
        """A pool for one of ``tp`` ranks of a model; ``storage`` as in the constructor.

        ``model`` is a name or a shape of :mod:`sluice.layers.qwen`, or a transformers config
        (``model.config``). ``conv_columns`` defaults to ``W − 1``; give more for speculative
        decoding in engines that keep a longer window. ``conv_dtype`` defaults to the dtype of the
        model's activations (:meth:`PoolGeometry.for_model`).

        >>> StatePool.for_model("qwen3.5-0.8b", slots=1, tp=16).layer(17)[1].shape
        torch.Size([1, 1, 128, 128])
        """
        geometry = PoolGeometry.for_model(
            model,
            tp=tp,
            conv_columns=conv_columns,
            conv_dtype=conv_dtype,
            state_dtype=state_dtype,
            tag=tag,
        )
        return cls(geometry, slots, **storage)

    @classmethod
    def from_tensors(
        cls,
        conv: torch.Tensor | Sequence[torch.Tensor],
        recurrent: torch.Tensor | Sequence[torch.Tensor],
        *,
        state_layout: StateLayout = "vk",
        conv_order: ConvOrder = "dl",
        reserve_slot_0: bool = False,
        tag: str = "",
    ) -> StatePool:
        """A pool over tensors that an engine already has; nothing is copied or cleared.

        ``conv``: ``[layers, slots, D, L]`` (``"dl"``) or ``[layers, slots, L, D]`` (``"ld"``), one
        tensor or a sequence of one ``[slots, ..]`` per layer; any strides that do not overlap.
        ``recurrent``: likewise ``[layers, slots, HV, V, K]`` (``"kv"``: ``[.., K, V]``), the last
        three dims contiguous; ``stride(0)`` of a layer may be larger (pages).
        All slots are free at first: :meth:`claim` those the engine has filled. Raises
        ``ContractError`` naming the tensor and layer that does not fit the others.

        >>> page = torch.zeros(5, 100)  # 5 slots; 96 elements of state in a page of 100
        >>> state = page.as_strided((5, 2, 6, 8), (100, 48, 8, 1))
        >>> pool = StatePool.from_tensors([torch.zeros(5, 16, 3)], [state], reserve_slot_0=True)
        >>> slot, = pool.claim([3])
        >>> page[3] = 1.0
        >>> float(pool.snapshot(slot).recurrent.sum())
        96.0
        """
        if isinstance(conv, torch.Tensor) and isinstance(recurrent, torch.Tensor):
            parts = [(conv, recurrent)]
        else:
            for given, name in ((conv, "conv"), (recurrent, "recurrent")):
                several = isinstance(given, (Sequence, torch.Tensor))
                several = several and not isinstance(given, (str, bytes))
                if not several or not all(isinstance(x, torch.Tensor) for x in given):
                    expected = "a tensor, or one for each layer"
                    raise ContractError("from_tensors", name, expected, arguments.shown(given))
            if len(conv) != len(recurrent) or not len(conv):
                expected = f"as many layers as conv, {len(conv)}, and at least one"
                raise ContractError("from_tensors", "recurrent", expected, len(recurrent))
            parts = [(c.unsqueeze(0), s.unsqueeze(0)) for c, s in zip(conv, recurrent, strict=True)]
        geometry = geometry_of(parts, state_layout, conv_order, tag)
        check_options(parts[0][1].shape[1], state_layout, conv_order, reserve_slot_0)
        pool = cls.__new__(cls)
        pool._bind(geometry, parts, state_layout, conv_order, reserve_slot_0)
        return pool

    def _bind(
        self,
        geometry: PoolGeometry,
        parts: list[tuple[torch.Tensor, torch.Tensor]],  # each [its layers, slots, ..], as stored
        state_layout: StateLayout,
        conv_order: ConvOrder,
        reserve_slot_0: bool,
    ) -> None:
        self.geometry, self.state_layout, self.conv_order = geometry, state_layout, conv_order
        self.slots, self.device = parts[0][1].shape[1], parts[0][1].device
        self.pad_slot = 0 if reserve_slot_0 else -1
        self._parts = [(c.mT if conv_order == "ld" else c, s) for c, s in parts]
        self._tensors = [tensor for part in self._parts for tensor in part]
        self._layers = [(c[i], s[i]) for c, s in self._parts for i in range(c.shape[0])]
        self._lock = threading.Lock()
        self._book = SlotBook(self.slots, self.pad_slot, self.device)

    def __repr__(self) -> str:
        g = self.geometry
        return (
            f"StatePool(layers={g.layers}, slots={self.slots}, available={self.available}, "
            f"conv={list(g.conv_shape)} {g.conv_dtype}, state={list(g.state_shape)} "
            f"{g.state_dtype} {self.state_layout!r}, device={str(self.device)!r})"
        )

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuse ``copy``, ``deepcopy`` and ``pickle``: a pool has one owner."""
        raise PoolError(
            "StatePool: a pool is not copied or pickled, because slots, views and CUDA graphs refer"
            " to its memory; use snapshot and restore, or save and load"
        )

    # ---- memory: views, never copies ------------------------------------------------------------

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """``(conv [slots, D, L], recurrent [slots, HV, V, K])`` of one linear layer, as views.

        ``index`` counts linear layers (``QwenShape.linear_index`` translates a model's layer
        number). The recurrent view is ``[slots, HV, K, V]`` in a ``"kv"`` pool.
        """
        plain = isinstance(index, int) and not isinstance(index, bool)
        if not plain or not 0 <= index < len(self._layers):
            got = arguments.shown(index)
            raise ContractError("layer", "index", f"0..{len(self._layers) - 1}", got)
        return self._layers[index]

    @property
    def conv(self) -> torch.Tensor:
        """``[layers, slots, D, L]``, a view. ``PoolError`` if layers were adopted one by one."""
        return self._whole()[0]

    @property
    def recurrent(self) -> torch.Tensor:
        """``[layers, slots, HV, V, K]`` (``"kv"``: ``[.., K, V]``), a view, as :attr:`conv`."""
        return self._whole()[1]

    def vllm_views(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Per layer ``(conv [slots, L, D], recurrent [slots, HV, V, K])``, as vLLM binds them.

        The memory order is vLLM's default in a pool made with ``conv_order="ld"``.
        """
        return [(conv.mT, self._vk(state)) for conv, state in self._layers]

    def sglang_views(self) -> tuple[torch.Tensor, torch.Tensor]:
        """``(conv [layers, slots, D, L], recurrent [layers, slots, HV, V, K])``, as in SGLang."""
        conv, state = self._whole()
        return conv, self._vk(state)

    def transformers_views(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Per layer ``(conv [slots, D, L], recurrent [slots, HV, K, V])``; L is W there."""
        return [(conv, self._vk(state).mT) for conv, state in self._layers]

    def _whole(self) -> tuple[torch.Tensor, torch.Tensor]:
        if len(self._parts) > 1:
            raise PoolError(
                "StatePool: expected one tensor for all layers, got a pool over "
                f"{len(self._parts)} separate ones; use layer(i)"
            )
        return self._parts[0]

    def _vk(self, state: torch.Tensor) -> torch.Tensor:
        return state.mT if self.state_layout == "kv" else state

    def _beside(
        self, conv: torch.Tensor, state: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs over the same layers: (the snapshot's tensor, the pool's)."""
        first = 0
        for pool_conv, pool_state in self._parts:
            span = slice(first, first := first + pool_conv.shape[0])
            yield conv[span], pool_conv
            yield state[span], self._vk(pool_state)

    # ---- slots ----------------------------------------------------------------------------------

    @property
    def available(self) -> int:
        """How many slots are free."""
        return self._book.available

    @property
    def allocated(self) -> list[Slot]:
        """The slots in use, ascending."""
        with self._lock:
            return self._book.allocated

    def allocate(self, n: int = 1) -> list[Slot]:
        """Take the ``n`` lowest free slots, zeroed in every layer.

        Raises :class:`PoolExhaustedError`, having taken none, when fewer are free.
        """
        with self._lock, self._book.taking("allocate", n) as new:
            for first, last in runs(new):
                for tensor in self._tensors:
                    tensor[:, first : last + 1].zero_()
            return new

    def claim(self, slots: Slots) -> list[Slot]:
        """Mark free slots as allocated and keep their contents, for rows that an engine filled.

        Raises :class:`PoolError`, having claimed none, when one is allocated already.
        """
        with self._lock:
            return self._book.claim(slots)

    def free(self, slots: Slots) -> None:
        """Free slots. A tensor of slots is copied to the host, as in every method.

        Raises :class:`DoubleFreeError`, having freed none, when one is not allocated now.
        """
        with self._lock:
            self._book.free(slots)

    def indices(
        self, slots: Slots, *, pad_to: int | None = None, dtype: torch.dtype = torch.int64
    ) -> torch.Tensor:
        """``[n]`` int64 (or ``dtype``) on the pool's device: checked ``slots=`` for an operator.

        ``pad_to`` appends padded rows (``pool.pad_slot``) up to that length. Raises
        :class:`UseAfterFreeError` when a slot is not allocated now.
        """
        if dtype not in (torch.int64, torch.int32):
            raise ContractError("indices", "dtype", "torch.int64 or int32", arguments.shown(dtype))
        with self._lock:
            rows = self._book.owned("indices", slots)
        if pad_to is not None:
            arguments.integer("indices", "pad_to", pad_to, len(rows))
            rows += [self.pad_slot] * (pad_to - len(rows))
        return torch.tensor(rows, dtype=dtype, device=self.device)

    # ---- copies ---------------------------------------------------------------------------------

    def fork(self, slots: Slots, copies: int = 1) -> list[Slot]:
        """New slots with the same bits: ``copies`` of each of ``slots``, next to each other.

        Raises :class:`PoolExhaustedError` or :class:`UseAfterFreeError`, having taken none.
        """
        arguments.integer("fork", "copies", copies, 1)
        with self._lock:
            owned = self._book.owned("fork", slots)
            self._book.require_free("fork", len(owned) * copies)
            parents = [row for row in owned for _ in range(copies)]
            with self._book.taking("fork", len(parents)) as new:
                for parent, child in zip(parents, new, strict=True):
                    for tensor in self._tensors:
                        tensor[:, child].copy_(tensor[:, parent])
                return new

    def snapshot(self, slots: Slots, device: torch.device | str | None = None) -> StateSnapshot:
        """Copy the state of ``slots`` out, to ``device`` (default: the pool's).

        >>> pool = StatePool(PoolGeometry(layers=3, num_v_heads=2, conv_channels=8), slots=4)
        >>> mine = pool.allocate(2)
        >>> saved = pool.snapshot(mine)
        >>> pool.free(mine)
        >>> again = pool.restore(saved)
        >>> saved.recurrent.shape, len(again)
        (torch.Size([3, 2, 2, 128, 128]), 2)
        """
        g = self.geometry
        device = self.device if device is None else arguments.present("snapshot", device)
        with self._lock:
            rows = self._book.owned("snapshot", slots)
            lead = (g.layers, len(rows))
            conv = torch.empty(*lead, *g.conv_shape, dtype=g.conv_dtype, device=device)
            state = torch.empty(*lead, *g.state_shape, dtype=g.state_dtype, device=device)
            for outside, inside in self._beside(conv, state):
                for n, row in enumerate(rows):
                    outside[:, n].copy_(inside[:, row])
        return StateSnapshot(g, conv, state)

    def restore(self, snapshot: StateSnapshot, slots: Slots | None = None) -> list[Slot]:
        """Write a snapshot's sequences into ``slots``, in order (default: newly allocated).

        Raises :class:`GeometryError` for a snapshot of another geometry, ``ContractError`` for a
        wrong number of slots, :class:`PoolExhaustedError`, :class:`UseAfterFreeError`.
        """
        if not isinstance(snapshot, StateSnapshot):
            raise ContractError("restore", "snapshot", "a StateSnapshot", type(snapshot).__name__)
        self.geometry.require("restore", snapshot.geometry)
        with self._lock, contextlib.ExitStack() as stack:
            if slots is None:
                new = stack.enter_context(self._book.taking("restore", len(snapshot)))
            else:
                new = [self._book.handle(row) for row in self._book.owned("restore", slots)]
            _require_count(len(new), len(snapshot))
            for outside, inside in self._beside(snapshot.conv, snapshot.recurrent):
                for n, row in enumerate(new):
                    inside[:, row].copy_(outside[:, n])
            return new

    def save(self, path: str | Path, slots: Slots | None = None) -> None:
        """Save ``slots`` (default: all allocated, ascending) to a safetensors file."""
        self.snapshot(self.allocated if slots is None else slots, device="cpu").save(path)

    def load(self, path: str | Path, slots: Slots | None = None) -> list[Slot]:
        """Restore a saved file into ``slots`` (default: newly allocated), in the saved order.

        What :meth:`restore` refuses is refused before the file's state is read.
        """
        geometry, sequences = header(path)
        self.geometry.require("restore", geometry)
        with self._lock:
            if slots is None:
                self._book.require_free("restore", sequences)
            else:
                _require_count(len(self._book.owned("restore", slots)), sequences)
        return self.restore(StateSnapshot.load(path), slots)

    def draft_buffers(
        self, tokens: int, *, rows: int | None = None, dtype: torch.dtype | None = None
    ) -> DraftBuffers:
        """Buffers for drafts of up to ``tokens`` tokens, for ``verify`` and ``commit_layers``.

        One row for each slot, or ``rows`` of them (then give the operators ``draft_slots``).
        ``dtype`` is that of the convolution's inputs, by default the conv state's. The buffers hold
        ``tokens`` rows of k, d, g (one decay per head) and x, instead of ``tokens`` states.

        >>> geometry = PoolGeometry(layers=2, num_v_heads=2, conv_channels=768)
        >>> buffers = StatePool(geometry, slots=4).draft_buffers(3, rows=2)
        >>> buffers.k.shape, buffers.x.shape
        (torch.Size([2, 2, 3, 2, 128]), torch.Size([2, 2, 3, 768]))
        """
        g = self.geometry
        for value, name in ((tokens, "tokens"), (self.slots if rows is None else rows, "rows")):
            arguments.integer("draft_buffers", name, value, 1)
        if dtype is not None and dtype not in FLOATS:
            expected = f"one of {', '.join(map(str, FLOATS))}"
            raise ContractError("draft_buffers", "dtype", expected, arguments.shown(dtype))
        wide = torch.promote_types(g.state_dtype, torch.float32)
        lead = (g.layers, self.slots if rows is None else rows, tokens)

        def new(*tail: int, dtype: torch.dtype = wide) -> torch.Tensor:
            return torch.zeros(*lead, *tail, dtype=dtype, device=self.device)

        with torch.inference_mode(False):
            return DraftBuffers(
                k=new(g.num_k_heads, g.head_k_dim),
                d=new(g.num_v_heads, g.head_v_dim),
                g=new(g.num_v_heads),
                x=new(g.conv_channels, dtype=dtype or g.conv_dtype),
            )

    # ---- size -----------------------------------------------------------------------------------

    @staticmethod
    def bytes_per_sequence(model: Model, **options: Any) -> int:
        """Bytes one sequence takes on one rank: options as in :meth:`PoolGeometry.for_model`.

        >>> StatePool.bytes_per_sequence("qwen3.5-27b", tp=4, state_dtype=torch.bfloat16)
        19611648
        """
        return PoolGeometry.for_model(model, **options).bytes_per_sequence

    @staticmethod
    def sequences_that_fit(
        memory: int | str, model: Model, *, reserve_slot_0: bool = False, **options: Any
    ) -> int:
        """How many sequences fit in ``memory`` bytes of one rank (``"20 GB"``, ``"1.5 GiB"``).

        GB is 10⁹ bytes, GiB 2³⁰. A reserved slot 0 takes memory and serves no sequence. Options as
        in :meth:`bytes_per_sequence`.

        >>> StatePool.sequences_that_fit("20 GB", "qwen3.5-27b", tp=4)
        519
        """
        fit = parse_bytes(memory) // StatePool.bytes_per_sequence(model, **options)
        return max(fit - reserve_slot_0, 0)


def _require_count(slots: int, sequences: int) -> None:
    if slots != sequences:
        expected = f"{sequences} slots, one for each sequence of the snapshot"
        raise ContractError("restore", "slots", expected, slots)
