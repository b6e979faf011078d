"""Recipes for inputs: seeded, drawn in float64 on the CPU, the same numbers on every device.

The inputs are hard on purpose. Keys that repeat or nearly agree make the delta rule's triangular
system ill-conditioned; decays of A = 0 and A = 16 put heads that remember and heads that forget
into one call; pools hold NaN wherever a correct kernel does not read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

KEYS = ("random", "correlated", "repeated", "identical")
GATES = ("mild", "weak", "strong", "mixed")

SMALLEST_A = 1e-12  # stands for A = 0 where its logarithm is needed


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(gen: torch.Generator, *shape: int) -> Tensor:
    """Standard normal, float64, CPU."""
    return torch.randn(*shape, generator=gen, dtype=torch.float64)


def uniform(gen: torch.Generator, *shape: int) -> Tensor:
    """Uniform on [0, 1), float64, CPU."""
    return torch.rand(*shape, generator=gen, dtype=torch.float64)


# ----------------------------------------------------------------------------------- the tokens


def keys(gen: torch.Generator, B: int, T: int, H: int, K: int, kind: str = "random") -> Tensor:
    """Unit keys [B, T, H, K].

    random       independent directions
    correlated   one direction per head, with 20% noise: cosines of about 0.96
    repeated     four directions per head, in turn
    identical    one direction per head, at every token
    """
    x = normal(gen, B, T, H, K)
    if kind == "correlated":
        # the noise has a fifth of the direction's norm: both are K normal numbers
        x = normal(gen, B, 1, H, K) + 0.2 * x
    elif kind == "repeated":
        x = normal(gen, B, 4, H, K)[:, torch.arange(T) % 4]
    elif kind == "identical":
        x = normal(gen, B, 1, H, K).expand(B, T, H, K)
    elif kind != "random":
        raise ValueError(f"kind of keys must be one of {KEYS}, got {kind!r}")
    return x / x.norm(dim=-1, keepdim=True)


def decay_rates(gen: torch.Generator, Hv: int, kind: str = "mild") -> Tensor:
    """A [Hv], the factor of softplus in the decay: 0 forgets nothing, 16 forgets in tens of tokens.

    mild     uniform on [0, 1)
    weak     0
    strong   16
    mixed    0, 16 and a mild one in turn
    """
    mild = uniform(gen, Hv)
    if kind == "mild":
        return mild
    if kind in ("weak", "strong"):
        return torch.full_like(mild, 0.0 if kind == "weak" else 16.0)
    if kind != "mixed":
        raise ValueError(f"kind of gates must be one of {GATES}, got {kind!r}")
    turn = torch.arange(Hv) % 3
    return torch.where(turn == 0, 0.0, torch.where(turn == 1, 16.0, mild))


def raw_decay(
    gen: torch.Generator, B: int, T: int, Hv: int, kind: str = "mild", K: int | None = None
) -> dict[str, Tensor]:
    """``a [B, T, Hv]``, ``A_log [Hv]``, ``dt_bias [Hv]``; with K, a and dt_bias have it last.

    dt_bias lies on [-4, 0), the inverse softplus of 0.02 to 0.7, as in an initialised layer.
    """
    per_key = () if K is None else (K,)
    return {
        "a": normal(gen, B, T, Hv, *per_key),
        "A_log": decay_rates(gen, Hv, kind).clamp(min=SMALLEST_A).log(),
        "dt_bias": -4.0 + 4.0 * uniform(gen, Hv, *per_key),
    }


def decay(a: Tensor, A_log: Tensor, dt_bias: Tensor) -> Tensor:
    """``g`` of raw gates in float64; exactly zero where A is zero."""
    A = A_log.exp()
    A = torch.where(A <= 2 * SMALLEST_A, 0.0, A)
    return -(A if a.ndim == 3 else A[:, None]) * torch.nn.functional.softplus(a + dt_bias)


def raw_beta(gen: torch.Generator, B: int, T: int, Hv: int, ones: bool = False) -> Tensor:
    """``b [B, T, Hv]``; ``ones`` makes its sigmoid 1 in float32."""
    b = normal(gen, B, T, Hv)
    return torch.full_like(b, 40.0) if ones else b


def packed_views(
    parts: Sequence[Tensor],
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    spare: int = 0,
) -> list[Tensor]:
    """The parts [.., H, D] or [.., D] as views of one projection, as ``qkvz.split`` gives them.

    ``spare`` columns of NaN follow in every token, in the place of z.
    """
    lead = parts[0].shape[:2]
    flat = [x.reshape(*lead, -1) for x in parts]
    flat.append(torch.full((*lead, spare), float("nan"), dtype=torch.float64))
    together = torch.cat(flat, dim=-1).to(device, dtype)
    views = together.split([x.shape[-1] for x in flat], dim=-1)[: len(parts)]
    return [x.unflatten(-1, p.shape[2:]) for x, p in zip(views, parts, strict=True)]


def cu_seqlens(lengths: Iterable[int], dtype: torch.dtype = torch.int32) -> Tensor:
    """Bounds [N + 1] of packed sequences; lengths may be 0, and there may be none."""
    total = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)
    return total.to(dtype)


# ------------------------------------------------------------------------------------ the pools


def recurrent_state(gen: torch.Generator, P: int, Hv: int, V: int, K: int) -> Tensor:
    """A state as large as after a few hundred tokens, [P, Hv, V, K], float64."""
    return 0.3 * normal(gen, P, Hv, V, K)


def poisoned_pool(pool: Tensor, used: Iterable[int]) -> Tensor:
    """A copy of ``pool`` that is NaN except in the rows ``used``."""
    poisoned = torch.full_like(pool, float("nan"))
    rows = sorted(set(used))
    poisoned[rows] = pool[rows]
    return poisoned


def padded_pool(pool: Tensor, gap: int = 8, order: str | None = None) -> Tensor:
    """A copy of ``pool`` whose rows lie ``gap`` elements apart, with NaN between them.

    ``order`` "ld" stores a conv state's columns outermost, [P, L, D], and returns it as [P, D, L].
    """
    rows = pool.transpose(1, 2) if order == "ld" else pool
    size = rows[0].numel() if len(rows) else 0
    storage = pool.new_full((rows.shape[0], size + gap), float("nan"))
    inner = rows[:1].contiguous().stride()[1:]
    view = storage.as_strided(rows.shape, (size + gap, *inner))
    view.copy_(rows)
    return view.transpose(1, 2) if order == "ld" else view


def choose_slots(gen: torch.Generator, P: int, n: int, first: int = 0) -> list[int]:
    """``n`` different rows of a pool in random order, none below ``first``."""
    return (torch.randperm(P - first, generator=gen)[:n] + first).tolist()


# ------------------------------------------------------------------------- uninitialised memory

_EMPTY: tuple[tuple[Any, str], ...] = (
    (torch, "empty"),
    (torch, "empty_like"),
    (torch, "empty_strided"),
    (torch.Tensor, "new_empty"),
    (torch.Tensor, "new_empty_strided"),
)
NAN_BYTE = 0xFF
"""Floats of 16, 32 and 64 bits that consist of this byte are NaN."""


def _filled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def fill(*args: Any, **kwargs: Any) -> Tensor:
        tensor = function(*args, **kwargs)
        # while a compiler traces, a fill would become part of its graph
        if torch.compiler.is_compiling() or type(tensor) is not Tensor:
            return tensor
        if tensor.is_floating_point() or tensor.is_complex():
            with torch.no_grad():
                tensor.fill_(float("nan"))
        elif tensor.dtype == torch.uint8:  # memory that is cut into tensors later
            tensor.fill_(NAN_BYTE)
        return tensor

    return fill


@contextmanager
def nan_empty() -> Iterator[None]:
    """Fill the results of ``torch.empty`` and its variants with NaN, so that a missing store shows.

    It covers ``empty``, ``empty_like``, ``empty_strided`` and the tensor methods ``new_empty`` and
    ``new_empty_strided``, for the whole process while active. Bytes, which a workspace is made of,
    are NaN as floats of any width. Other integers and traced code are left alone.
    """
    with torch.device("cpu"):  # torch lists its constructors once; the originals must be listed,
        torch.empty(0)  # or ``with torch.device(...)`` would ignore them from now on
    saved = [(owner, name, owner.__dict__.get(name)) for owner, name in _EMPTY]
    for owner, name in _EMPTY:
        setattr(owner, name, _filled(getattr(owner, name)))
    try:
        yield
    finally:
        for owner, name, original in saved:
            if original is None:  # inherited: remove the override
                delattr(owner, name)
            else:
                setattr(owner, name, original)
