"""The shape of one sequence's state (PoolGeometry), and state outside a pool (StateSnapshot)."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Protocol

import torch

from sluice import state_files
from sluice.contract import arguments
from sluice.contract.errors import ContractError
from sluice.contract.meta import overlaps
from sluice.layers.qwen import QwenShape, from_config, named
from sluice.state_files import PoolError


class ModelConfig(Protocol):
    """A transformers config, as far as it is looked at here."""

    @property
    def model_type(self) -> str: ...


Model = str | QwenShape | Mapping[str, Any] | ModelConfig
"""A name of ``layers.qwen``, a shape, or a transformers config (object or mapping)."""

_DTYPES = {str(d)[6:]: d for d in (torch.float32, torch.bfloat16, torch.float16, torch.float64)}
_UNITS = {"": 1, "b": 1} | {
    prefix + suffix: base**power
    for base, suffix in ((1000, "b"), (1024, "ib"))
    for power, prefix in enumerate("kmgt", 1)
}
_FORMAT, _VERSION = "sluice.state", "1"


class GeometryError(PoolError, ValueError):
    """State and pool have different geometries."""


@dataclass(frozen=True)
class PoolGeometry:
    """The dimensions and dtypes of one sequence's state in all linear layers.

    How a pool stores the state (``state_layout``, ``conv_order``, slots, strides, device) is not
    part of the geometry. ``tag`` is free text that must agree too, for differences that shapes do
    not show: the rank, or the checkpoint (``tag="Qwen3.6-27B rank 3"``).

    >>> geometry = PoolGeometry.for_model("qwen3.5-27b", tp=4)
    >>> geometry.num_v_heads, geometry.conv_channels, geometry.bytes_per_sequence
    (12, 2560, 38486016)
    """

    layers: int  # linear layers only
    num_v_heads: int
    conv_channels: int
    head_k_dim: int = 128
    head_v_dim: int = 128
    conv_columns: int = 3  # L; at least W - 1
    state_dtype: torch.dtype = torch.float32
    conv_dtype: torch.dtype = torch.bfloat16
    tag: str = ""

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name.endswith("dtype"):
                if not isinstance(value, torch.dtype) or value not in _DTYPES.values():
                    expected = f"one of {', '.join(map(str, _DTYPES.values()))}"
                    got = arguments.shown(value)
                    raise ContractError("PoolGeometry", f.name, expected, got)
            elif f.name == "tag":
                arguments.instance("PoolGeometry", "tag", value, str, "a string")
            else:
                arguments.integer("PoolGeometry", f.name, value, 1)

    @classmethod
    def for_model(
        cls,
        model: Model,
        *,
        tp: int = 1,
        conv_columns: int | None = None,
        conv_dtype: torch.dtype | None = None,
        **options: Any,
    ) -> PoolGeometry:
        """Geometry of one of ``tp`` ranks of a model: a name, a shape or a transformers config.

        Names and shapes are those of ``layers.qwen``; a config is read by its ``from_config``.
        ``conv_columns`` defaults to ``W − 1``; ``options`` are ``state_dtype`` (float32) and
        ``tag``. A conv window holds activations, so ``conv_dtype`` defaults to the config's dtype,
        to float32 where a config says none (exact for every model), and to bfloat16, as the models
        were released, for a name or a shape.
        """
        shape = _shape(model).shard(tp)
        least = shape.conv_width - 1
        if conv_columns is not None:
            arguments.integer("PoolGeometry", "conv_columns", conv_columns, 1)
            if conv_columns < least:
                expected = f"at least W - 1 = {least} of {shape.name}"
                raise ContractError("PoolGeometry", "conv_columns", expected, conv_columns)
        return cls(
            layers=shape.linear_layers,
            num_v_heads=shape.num_v_heads,
            conv_channels=shape.conv_channels,
            head_k_dim=shape.head_k_dim,
            head_v_dim=shape.head_v_dim,
            conv_columns=conv_columns or least,
            conv_dtype=_activations(model) if conv_dtype is None else conv_dtype,
            **options,
        )

    @property
    def num_k_heads(self) -> int:
        """Key heads, from ``D = 2·HK·K + HV·V``; GeometryError if no number fits."""
        keys = self.conv_channels - self.num_v_heads * self.head_v_dim
        heads, rest = divmod(keys, 2 * self.head_k_dim)
        if heads < 1 or rest or self.num_v_heads % heads:
            raise GeometryError(
                f"num_k_heads: expected conv_channels = 2 HK {self.head_k_dim} + "
                f"{self.num_v_heads} {self.head_v_dim}, got {self.conv_channels}"
            )
        return heads

    def resharded(self, tp: int, to: int) -> PoolGeometry:
        """One rank's geometry with heads divided over ``to`` ranks instead of ``tp``.

        Raises ``ContractError`` where ``to`` does not divide the key heads.

        >>> PoolGeometry.for_model("qwen3.5-27b", tp=4).resharded(4, 2).num_v_heads
        24
        """
        heads = self.num_k_heads * tp
        if tp < 1 or to < 1 or heads % to:
            expected = f"ranks that divide {heads} key heads"
            raise ContractError("PoolGeometry", "to", expected, to)
        per_head = self.num_v_heads // self.num_k_heads, self.conv_channels // self.num_k_heads
        counts = [each * heads // to for each in per_head]
        return replace(self, num_v_heads=counts[0], conv_channels=counts[1])

    @property
    def conv_shape(self) -> tuple[int, int]:
        """``(D, L)``: one sequence's conv state in one layer."""
        return self.conv_channels, self.conv_columns

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """``(HV, V, K)``: one sequence's recurrent state in one layer."""
        return self.num_v_heads, self.head_v_dim, self.head_k_dim

    @property
    def bytes_per_sequence(self) -> int:
        """Bytes of one slot, both kinds, all layers of this rank."""
        conv = self.conv_channels * self.conv_columns * self.conv_dtype.itemsize
        state = self.num_v_heads * self.head_v_dim * self.head_k_dim * self.state_dtype.itemsize
        return self.layers * (conv + state)

    def to_json(self) -> str:
        """The geometry as one line of JSON, the same in every process."""
        plain = {k: str(v)[6:] if k.endswith("dtype") else v for k, v in asdict(self).items()}
        return json.dumps(plain, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> PoolGeometry:
        """The inverse of :meth:`to_json`."""
        plain: dict[str, Any] = json.loads(text)
        if not isinstance(plain.get("tag", ""), str):
            raise ContractError("PoolGeometry", "tag", "text", type(plain["tag"]).__name__)
        for name in ("state_dtype", "conv_dtype"):
            plain[name] = _DTYPES[plain[name]]
        return cls(**plain)

    @property
    def digest(self) -> str:
        """A hash; state can be exchanged exactly between equal hashes."""
        return hashlib.sha256(f"{_FORMAT} {_VERSION} {self.to_json()}".encode()).hexdigest()[:16]

    def require(self, op: str, other: PoolGeometry) -> None:
        """Raise :class:`GeometryError`, naming each field that differs, unless digests agree."""
        if self.digest != other.digest:
            pairs = [(f.name, getattr(self, f.name), getattr(other, f.name)) for f in fields(self)]
            differ = "; ".join(f"{n}: expected {a!r}, got {b!r}" for n, a, b in pairs if a != b)
            raise GeometryError(
                f"{op}: geometry {self.digest} expected, got {other.digest}: {differ}"
            )


@dataclass(frozen=True)
class StateSnapshot:
    """State of n sequences, copied out of a pool; it shares no memory with the pool.

    ``conv [layers, n, D, L]`` and ``recurrent [layers, n, HV, V, K]`` (always the ``"vk"`` layout),
    contiguous, in the dtypes of ``geometry``. Raises :class:`GeometryError` where tensors and
    geometry disagree. An example is at :meth:`StatePool.snapshot`.
    """

    geometry: PoolGeometry
    conv: torch.Tensor
    recurrent: torch.Tensor

    def __post_init__(self) -> None:
        kind = "a PoolGeometry"
        arguments.instance("StateSnapshot", "geometry", self.geometry, PoolGeometry, kind)
        for name in ("conv", "recurrent"):
            given = getattr(self, name)
            arguments.instance("StateSnapshot", name, given, torch.Tensor, "a tensor")
        g, n = self.geometry, self.conv.shape[1] if self.conv.dim() > 1 else 0
        for name, tensor, tail, dtype in (
            ("conv", self.conv, g.conv_shape, g.conv_dtype),
            ("recurrent", self.recurrent, g.state_shape, g.state_dtype),
        ):
            found = tuple(tensor.shape), tensor.dtype
            _require_kind("StateSnapshot", name, found, (g.layers, n, *tail), dtype)

    def __len__(self) -> int:
        return self.conv.shape[1]

    def __repr__(self) -> str:
        g = self.geometry
        return (
            f"StateSnapshot(sequences={len(self)}, layers={g.layers}, conv={list(g.conv_shape)} "
            f"{g.conv_dtype}, state={list(g.state_shape)} {g.state_dtype}, "
            f"device={str(self.recurrent.device)!r})"
        )

    def to(self, device: torch.device | str) -> StateSnapshot:
        """The same state on another device."""
        return StateSnapshot(self.geometry, self.conv.to(device), self.recurrent.to(device))

    def save(self, path: str | Path) -> None:
        """Write a safetensors file with geometry and version in its metadata.

        A file already at ``path`` is replaced only once the new one is complete and on the disk.
        Only the user may read it (mode 0600). Raises :class:`MissingDependencyError` without
        safetensors, and :class:`PoolError` where ``path`` is a directory, or in none that exists,
        or cannot be written.
        """
        arguments.path("save", path)
        tensors = {"conv": self.conv, "recurrent": self.recurrent}
        tensors = {name: x.cpu().contiguous() for name, x in tensors.items()}
        about = {"format": _FORMAT, "version": _VERSION, "geometry": self.geometry.to_json()}
        about |= {"digest": self.geometry.digest}
        about |= {f"sha256 {name}": state_files.checksum(x) for name, x in tensors.items()}
        state_files.write(Path(path), tensors, about)

    @staticmethod
    def load(path: str | Path, device: torch.device | str = "cpu") -> StateSnapshot:
        """Read a file written by :meth:`save`.

        Raises :class:`PoolError` for a file that is not a snapshot, has another version,
        contradicts itself or is damaged, and :class:`MissingDependencyError` without safetensors.
        """
        with state_files.reading(path) as file:
            geometry, _ = _header(path, file)
            tensors = {name: state_files.copied(file, name) for name in ("conv", "recurrent")}
            about = file.metadata()
        snapshot = StateSnapshot(geometry, **tensors)
        for name, x in tensors.items():
            if about.get(f"sha256 {name}") != state_files.checksum(x):
                text = f"load: {path}: expected {name} as it was saved, got other bytes (checksum)"
                raise PoolError(f"{text}: the file is damaged")
        return snapshot if torch.device(device).type == "cpu" else snapshot.to(device)


def header(path: str | Path) -> tuple[PoolGeometry, int]:
    """The geometry of a saved file and its number of sequences; no state is read."""
    with state_files.reading(path) as file:
        return _header(path, file)


def _header(path: str | Path, file: Any) -> tuple[PoolGeometry, int]:
    """The same of an open file. Shapes are held to the geometry before anything is allocated."""
    about = file.metadata() or {}
    found = about.get("format"), about.get("version")
    if found != (_FORMAT, _VERSION):
        raise PoolError(
            f"load: {path}: expected format {_FORMAT!r} version {_VERSION!r}, got "
            f"{found[0]!r} version {found[1]!r}"
        )
    geometry = PoolGeometry.from_json(about["geometry"])
    if about.get("digest") != geometry.digest:
        raise GeometryError(
            f"load: {path}: expected geometry {geometry.digest} (computed from its "
            f"fields), got {about.get('digest')}"
        )
    g, (conv, conv_dtype) = geometry, state_files.kind(file, "conv")
    n = conv[1] if len(conv) > 1 else 0
    _require_kind("load", "conv", (conv, conv_dtype), (g.layers, n, *g.conv_shape), g.conv_dtype)
    state = state_files.kind(file, "recurrent")
    _require_kind("load", "recurrent", state, (g.layers, n, *g.state_shape), g.state_dtype)
    return geometry, n


def _require_kind(
    op: str,
    name: str,
    found: tuple[tuple[int, ...], torch.dtype | None],
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> None:
    if found != (shape, dtype):
        came = f"{list(found[0])} {found[1]}"
        raise GeometryError(f"{op}: {name}: expected {list(shape)} {dtype}, got {came}")


def parse_bytes(memory: int | str) -> int:
    """Bytes of an int, or of text such as ``"20 GB"`` (10⁹) or ``"1.5GiB"`` (2³⁰).

    >>> parse_bytes("20 GB"), parse_bytes("1.5GiB"), parse_bytes(7)
    (20000000000, 1610612736, 7)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", str(memory).lower())
    if isinstance(memory, bool | float) or match is None or match[2] not in _UNITS:
        expected = "bytes as an int, or a number with B, kB, MB, GB, TB, KiB, MiB, GiB or TiB"
        raise ContractError("parse_bytes", "memory", expected, repr(memory))
    return int(Fraction(match[1]) * _UNITS[match[2]])


def geometry_of(
    parts: list[tuple[torch.Tensor, torch.Tensor]], state_layout: str, conv_order: str, tag: str
) -> PoolGeometry:
    """Geometry of an engine's tensors ``[their layers, slots, ..]``, after checking they agree."""
    conv, state = parts[0]
    for kind, (name, dims) in enumerate((("conv", 4), ("recurrent", 5))):
        like = parts[0][kind]
        for layer, tensor in enumerate(part[kind] for part in parts):
            expected, got = "", ""
            if tensor.dim() != dims:
                expected = f"{dims} dims, or {dims - 1} for each layer apart"
                got = f"{tensor.dim()} ({list(tensor.shape)})"
            elif _kind(tensor) != _kind(like):
                expected, got = f"{_kind(like)}, as layer 0", _kind(tensor)
            elif overlaps(tensor.shape, tensor.stride()):
                expected, got = "strides that do not overlap", f"{tensor.stride()}"
            elif kind == 1 and tensor.numel() and not tensor[0, 0].is_contiguous():
                expected, got = "the last three dims contiguous", f"strides {tensor.stride()}"
            if expected:
                where = f"{name}, layer {layer}" if len(parts) > 1 else name
                raise ContractError("from_tensors", where, expected, got)
        if like.numel() and len({part[kind].data_ptr() for part in parts}) < len(parts):
            raise ContractError("from_tensors", name, "memory of its own per layer", "one twice")
    if conv.shape[:2] != state.shape[:2] or conv.device != state.device:
        expected = f"layers, slots {list(state.shape[:2])} on {state.device}, as recurrent"
        raise ContractError("from_tensors", "conv", expected, [*conv.shape[:2], conv.device])
    channels, columns = conv.shape[2:] if conv_order == "dl" else conv.shape[:1:-1]
    v_dim, k_dim = state.shape[3:] if state_layout == "vk" else state.shape[:2:-1]
    return PoolGeometry(
        layers=sum(part.shape[0] for part, _ in parts),
        num_v_heads=state.shape[2],
        conv_channels=channels,
        head_k_dim=k_dim,
        head_v_dim=v_dim,
        conv_columns=columns,
        state_dtype=state.dtype,
        conv_dtype=conv.dtype,
        tag=tag,
    )


def check_options(slots: int, state_layout: str, conv_order: str, reserve_slot_0: bool) -> None:
    """Require options of a pool that are possible."""
    arguments.instance("StatePool", "reserve_slot_0", reserve_slot_0, bool, "True or False")
    arguments.integer("StatePool", "slots", slots, 1 + reserve_slot_0)
    if not isinstance(state_layout, str) or state_layout not in ("vk", "kv"):
        got = arguments.shown(state_layout)
        raise ContractError("StatePool", "state_layout", "'vk' or 'kv'", got)
    if not isinstance(conv_order, str) or conv_order not in ("dl", "ld"):
        got = arguments.shown(conv_order)
        raise ContractError("StatePool", "conv_order", "'dl' or 'ld'", got)


def _shape(model: Model) -> QwenShape:
    """The shape of whatever names or describes a model."""
    if isinstance(model, QwenShape):
        return model
    if isinstance(model, str):
        return named("for_model", "model", model)
    if isinstance(model, Mapping) or hasattr(model, "model_type") or hasattr(model, "text_config"):
        return from_config(model)
    expected = "a model's name, a QwenShape or a transformers config"
    raise ContractError("for_model", "model", expected, type(model).__name__)


def _activations(model: Model) -> torch.dtype:
    """The dtype of a model's activations."""
    if isinstance(model, str | QwenShape):
        return torch.bfloat16

    def get(config: Any, name: str) -> Any:
        if name == "torch_dtype" and not isinstance(config, Mapping):
            config = getattr(config, "__dict__", {})  # transformers' property of that name warns
        return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)

    for config in (get(model, "text_config"), model):
        for name in ("dtype", "torch_dtype"):
            if (found := get(config, name)) is not None:
                found = _DTYPES.get(str(found).removeprefix("torch."))
                if found is None:
                    expected = f"one of {', '.join(_DTYPES)}; or give conv_dtype"
                    raise ContractError("for_model", f"config.{name}", expected, get(config, name))
                return found
    return torch.float32


def _kind(tensor: torch.Tensor) -> str:
    return f"{list(tensor.shape[1:])} {tensor.dtype} on {tensor.device}"


def runs(rows: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The first and last row of each contiguous run in ascending ``rows``."""
    for _, run in itertools.groupby(enumerate(rows), key=lambda pair: pair[1] - pair[0]):
        members = [int(row) for _, row in run]
        yield members[0], members[-1]
