"""From the fields of a ``Case`` to the keyword arguments of its public function.

Padded rows and tokens of no sequence hold NaN in q, k, v and x (their gates are finite, because
checks may require that), and pools hold NaN in every row that is not read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sluice.testing import inputs as draw

if TYPE_CHECKING:
    from sluice.testing.case import Case

NAN = float("nan")


def inputs(case: Case, dtype: torch.dtype, device: torch.device, seed: int) -> dict[str, Any]:
    return _Build(case, dtype, device, seed).keywords()


class _Build:
    """One draw of a case's inputs."""

    def __init__(self, case: Case, dtype: torch.dtype, device: torch.device, seed: int) -> None:
        self.case, self.dtype, self.device = case, dtype, device
        self.gen = draw.generator(seed)
        self.wide = torch.float64 if dtype == torch.float64 else torch.float32
        self.B, self.T = case.grid

    def keywords(self) -> dict[str, Any]:
        op = self.case.op
        if op == "rms_norm_gated":
            return self._norm()
        if op == "step":
            return {**self._layer(), **self._rows(("conv_state", "state"))}
        if op in ("causal_conv1d", "conv_qkv"):
            return {**self._conv(), **self._packing(), **self._rows(("state",))}
        verify = self._drafts() if op == "verify" else {}
        pools = ("state", "conv_state") if self.case.with_conv else ("state",)
        return {**self._delta(), **verify, **self._packing(), **self._rows(pools)}

    # -------------------------------------------------------------------------------- operators

    def _delta(self) -> dict[str, Any]:
        c, B, T, gen = self.case, self.B, self.T, self.gen
        q = draw.keys(gen, B, T, c.query_heads, c.K)
        k = draw.keys(gen, B, T, c.Hk, c.K, c.keys)
        if c.normalize:  # any length: the operator normalises them
            q = q * (0.5 + 3.0 * draw.uniform(gen, B, T, c.query_heads, 1))
            k = k * (0.5 + 3.0 * draw.uniform(gen, B, T, c.Hk, 1))
        v = draw.normal(gen, B, T, c.Hv, c.V)
        q, k, v = self._place([self._poison(x) for x in (q, k, v)], self.dtype, spare=c.Hv * c.V)

        a = draw.raw_decay(gen, B, T, c.Hv, c.gates, c.K if c.per_key else None)
        b = draw.raw_beta(gen, B, T, c.Hv, ones=c.beta_one)
        tensors: dict[str, Any] = {"q": q, "k": k, "v": v}
        if c.raw:
            beta, g = self._place([b, a["a"]], self.dtype)
            tensors |= {name: self._plain(a[name], self.wide) for name in ("A_log", "dt_bias")}
        else:
            beta, g = self._place([b.sigmoid(), draw.decay(**a)], self.wide)
        if c.has_g:
            tensors["g"] = g
        if c.has_beta:
            tensors["beta"] = beta
        tensors = {name: self._arranged(name, x) for name, x in tensors.items()}
        options = {
            "scale": (c.scale, None),
            "normalize_qk": (c.normalize, False),
            "neg_eigval": (c.neg_eigval, False),
            "state_layout": (c.state_layout, "vk"),
            "layout": (c.layout, None),
        }
        return {**tensors, **_given(options)}

    def _drafts(self) -> dict[str, Any]:
        c = self.case
        accepted = torch.tensor(c.accepted or (c.tokens,) * c.N, dtype=c.index_dtype)
        extra: dict[str, Any] = {"num_accepted": accepted.to(self.device)}
        if c.with_conv:
            x = self._poison(draw.normal(self.gen, self.B, self.T, c.channels))
            (x,) = self._place([x], self.dtype)
            extra["conv_inputs"] = x[0] if c.flat else x
        return extra

    def _conv(self) -> dict[str, Any]:
        c, B, T, gen = self.case, self.B, self.T, self.gen
        x = self._poison(draw.normal(gen, B, T, c.channels))
        (x,) = self._place([x], self.dtype, spare=c.Hv * c.V)
        x = x.transpose(1, 2).contiguous() if c.layout == "bdt" else x
        tensors = {"x": x[0] if c.flat else x, **self._conv_weights("")}
        if c.op == "conv_qkv":
            a = draw.raw_decay(gen, B, T, c.Hv, c.gates)
            b = draw.raw_beta(gen, B, T, c.Hv, ones=c.beta_one)
            b, raw = self._place([b, a["a"]], self.dtype)
            if c.has_g:
                tensors["a"] = raw[0] if c.flat else raw
                tensors |= {name: self._plain(a[name], self.wide) for name in ("A_log", "dt_bias")}
            if c.has_beta:
                tensors["b"] = b[0] if c.flat else b
            tensors |= {"num_k_heads": c.Hk, "num_v_heads": c.Hv}
            tensors |= {"head_k_dim": c.K, "head_v_dim": c.V, "normalize_qk": c.normalize}
            tensors |= _given({"neg_eigval": (c.neg_eigval, False)})
        options = {
            "activation": (c.activation, "silu"),
            "freeze": (c.freeze, False),
            "layout": (c.layout, None),
        }
        if c.starts is not None:
            tensors["window_start"] = self._index(list(c.starts))
        return {**tensors, **_given(options)}

    def _norm(self) -> dict[str, Any]:
        c, gen = self.case, self.gen
        x = draw.normal(gen, self.B, self.T, c.Hv, c.V)
        z = draw.normal(gen, self.B, self.T, c.Hv, c.V)
        weight = 1.0 + 0.2 * draw.normal(gen, c.V)
        x, z = self._place([x, z], self.dtype, spare=c.V)
        activation = _given({"activation": (c.gate_activation, "silu")})
        return {"x": x, "z": z, "weight": self._plain(weight, self.dtype), **activation}

    def _layer(self) -> dict[str, Any]:
        c, B, T, gen = self.case, self.B, self.T, self.gen
        qkv = self._poison(draw.normal(gen, B, T, c.channels))
        z = self._poison(draw.normal(gen, B, T, c.Hv * c.V))
        raw = draw.raw_decay(gen, B, T, c.Hv, c.gates)
        b = draw.raw_beta(gen, B, T, c.Hv, ones=c.beta_one)
        if c.pairs:
            parts = self._place([qkv, z, b, raw["a"]], self.dtype)
        else:  # the operator decides which head each number belongs to
            parts = [torch.cat([qkv, z], dim=-1), torch.cat([b, raw["a"]], dim=-1)]
            parts = self._place(parts, self.dtype)
        parts = [x[:, 0] for x in parts] if c.flat else parts
        qkvz, ba = ((parts[0], parts[1]), (parts[2], parts[3])) if c.pairs else parts
        norm_weight = 1.0 + 0.2 * draw.normal(gen, c.V)
        options = {
            "order": (c.order, "split"),
            "conv_activation": (c.activation, "silu"),
            "gate_activation": (c.gate_activation, "silu"),
            "scale": (c.scale, None),
            "neg_eigval": (c.neg_eigval, False),
            "normalize_qk": (c.normalize, True),
            "state_layout": (c.state_layout, "vk"),
        }
        return {
            "qkvz": qkvz,
            "ba": ba,
            **self._conv_weights("conv_"),
            "A_log": self._plain(raw["A_log"], self.wide),
            "dt_bias": self._plain(raw["dt_bias"], self.wide),
            "norm_weight": self._plain(norm_weight, self.dtype),
            **_given(options),
        }

    def _conv_weights(self, prefix: str) -> dict[str, Tensor]:
        c = self.case
        weight = draw.normal(self.gen, c.channels, c.W) / c.W**0.5
        found = {f"{prefix}weight": self._plain(weight, self.dtype)}
        if c.bias:
            found[f"{prefix}bias"] = self._plain(draw.normal(self.gen, c.channels), self.dtype)
        return found

    # ---------------------------------------------------------------------------- rows and pools

    def _packing(self) -> dict[str, Any]:
        c = self.case
        if c.lengths is None:
            return {}
        bounds = draw.cu_seqlens(c.lengths, c.index_dtype)
        found: dict[str, Any] = {"cu_seqlens": bounds.to(self.device)}
        if c.host_lengths:
            found["cu_seqlens_cpu"] = bounds
        return found

    def _rows(self, pools: tuple[str, ...]) -> dict[str, Any]:
        """slots, write_slots, has_state, checkpoints, and the pools they point into."""
        c, N = self.case, self.case.N
        if c.state == "none":
            return {}
        saved = self._saved_columns()
        first = 1 if c.pad_slot == 0 else 0
        longest = max(c.sequence_lengths, default=0) if c.each else 0
        needed = N * (2 if c.moved else 1) + N * (saved + longest)
        P = needed + first + 3
        if c.state == "rows":
            free = list(range(P))
        else:
            free = draw.choose_slots(self.gen, P, needed, first)
        slots, free = free[:N], free[N:]
        targets, free = (free[:N], free[N:]) if c.moved else (slots, free)

        found: dict[str, Any] = {}
        pads = (c.pad_slot, c.pad_slot - 4)
        if c.state == "slots":
            chosen = [pads[i % 2] if i in c.padded else s for i, s in enumerate(slots)]
            found["slots"] = self._index(chosen)
        if c.moved or c.unkept:
            chosen = [pads[i % 2] if i in c.unkept else s for i, s in enumerate(targets)]
            found["write_slots"] = self._index(chosen)
        if c.each:
            found["write_slots"] = self._each(slots, free, longest, pads)
        if c.new:
            known = torch.tensor([i not in c.new for i in range(N)], dtype=torch.bool)
            found["has_state"] = known.to(self.device)
        found |= _given({"pad_slot": (c.pad_slot, -1)})
        if saved:
            found["checkpoints"] = self._checkpoints(free, saved)
        used = [s for i, s in enumerate(slots) if i not in c.padded and i not in c.new]
        for name in pools:
            conv = name == "conv_state" or c.op in ("causal_conv1d", "conv_qkv")
            found[name] = self._conv_pool(P, used) if conv else self._state_pool(P, used)
        return found

    def _each(
        self, slots: list[int], free: list[int], columns: int, pads: tuple[int, int]
    ) -> Tensor:
        """A write slot for each token. Row i's token i is written to the row's own slot, and in
        rows that are ``unkept`` the next token is written nowhere."""
        c = self.case
        rows = torch.tensor(free[: c.N * columns]).reshape(c.N, columns)
        for i in range(c.N if columns else 0):
            if not c.moved:
                rows[i, i % columns] = slots[i]
            if i in c.unkept:
                rows[i, (i + 1) % columns] = pads[i % 2]
        return rows.to(self.device, c.index_dtype)

    def _saved_columns(self) -> int:
        c = self.case
        if c.positions is not None:
            return len(c.positions[0])
        return max(c.sequence_lengths) // c.every if c.every else 0

    def _checkpoints(self, free: list[int], columns: int) -> dict[str, Any]:
        """Every column has its own slot; columns that a sequence does not reach are skipped."""
        c = self.case
        slots = torch.tensor(free[: c.N * columns]).reshape(c.N, columns)
        if c.positions is not None:
            positions = torch.tensor(c.positions)
            slots = torch.where(positions < 0, -1, slots)
            positions = positions.clamp(min=0).to(self.device, c.index_dtype)
            return {"slots": slots.to(self.device, c.index_dtype), "positions": positions}
        assert c.every is not None
        reached = torch.tensor([n // c.every for n in c.sequence_lengths])
        slots = torch.where(torch.arange(columns) < reached[:, None], slots, -1)
        return {"slots": slots.to(self.device, c.index_dtype), "every": c.every}

    def _state_pool(self, P: int, used: list[int]) -> Tensor:
        c = self.case
        dtype = self.wide if c.state_dtype == torch.float32 else c.state_dtype
        pool = draw.recurrent_state(self.gen, P, c.Hv, c.V, c.K)
        pool = pool if c.state_layout == "vk" else pool.transpose(2, 3).contiguous()
        pool = draw.poisoned_pool(pool, used).to(self.device, dtype)
        return draw.padded_pool(pool, c.gap) if c.gap else pool

    def _conv_pool(self, P: int, used: list[int]) -> Tensor:
        c = self.case
        pool = draw.normal(self.gen, P, c.channels, c.window)
        if c.starts is None:  # else columns of rows that are written may stay as they are
            pool = draw.poisoned_pool(pool, used)
        pool = pool.to(self.device, self.dtype)
        plain = c.gap == 0 and c.conv_order == "dl"
        return pool if plain else draw.padded_pool(pool, c.gap, c.conv_order)

    # ------------------------------------------------------------------------------ small pieces

    def _poison(self, x: Tensor) -> Tensor:
        """NaN at the tokens of padded rows and of the tail."""
        c = self.case
        if c.lengths is None:
            x[list(c.padded)] = NAN
            return x
        bounds = draw.cu_seqlens(c.lengths).tolist()
        for i in c.padded:
            x[:, bounds[i] : bounds[i + 1]] = NAN
        x[:, bounds[-1] :] = NAN
        return x

    def _place(self, parts: list[Tensor], dtype: torch.dtype, spare: int = 0) -> list[Tensor]:
        """The parts on the device, separate or as views of one projection."""
        if self.case.strided:
            return draw.packed_views(parts, dtype, self.device, spare)
        return [self._plain(x, dtype) for x in parts]

    def _arranged(self, name: str, x: Tensor) -> Tensor:
        """[B, T, ..] in the case's layout."""
        if name in ("A_log", "dt_bias"):
            return x
        x = x.transpose(1, 2).contiguous() if self.case.layout == "bhtd" else x
        return x[0] if self.case.flat else x

    def _plain(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.contiguous().to(self.device, dtype)

    def _index(self, rows: list[int]) -> Tensor:
        return torch.tensor(rows, dtype=self.case.index_dtype).to(self.device)


def buffers(case: Case, inputs: dict[str, Any], kind: Any) -> dict[str, Any]:
    """``buffers`` and ``draft_slots`` of a verify: NaN, with room for one more token and row."""
    k, g, x, c = inputs["k"], inputs.get("g"), inputs.get("conv_inputs"), case
    wide = torch.float64 if k.dtype == torch.float64 else torch.float32
    lead = (c.N + 1, max(c.sequence_lengths, default=0) + 1)

    def new(dtype: torch.dtype, *tail: int) -> Tensor:
        return torch.full((*lead, *tail), NAN, dtype=dtype, device=k.device)

    made = kind(
        new(wide, c.Hk, c.K),
        new(wide, c.Hv, c.V),
        None if g is None else new(wide, c.Hv, *([c.K] if c.per_key else [])),
        None if x is None else new(x.dtype, c.channels),
    )
    rows = torch.arange(c.N, 0, -1, dtype=c.index_dtype, device=k.device)
    return {"buffers": made, "draft_slots": rows}


def _given(options: dict[str, tuple[Any, Any]]) -> dict[str, Any]:
    """Only the options that differ from their defaults, so that calls use the defaults."""
    return {name: value for name, (value, default) in options.items() if value != default}
