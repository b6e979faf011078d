"""Numeric comparison. Every ``assert_*`` raises; none returns a verdict.

Two errors of a result are measured, both against the float64 oracle:

    relative error    ‖actual − exact‖ / ‖exact‖ over the whole tensor and, four times as lenient,
                      over each slice of a dimension ``per``, to find a single wrong head
    largest error     max |actual − exact| / max(|exact|, rms(exact)), to find a single element

``assert_matches`` takes its limit from the error of plain PyTorch in the same dtype;
``assert_within`` takes it from the contract's table, ``tolerance``.
"""

from __future__ import annotations

import torch
from torch import Tensor

# By rounding alone, over all cases and dtypes, the largest error is up to 17 times the relative
# error of the whole, and a slice's error up to 2 times. Twice that is allowed.
PEAK = 32.0
SLICE = 4.0

# The contract's "Exactness" table.
FLOAT64 = 1e-12
FLOAT32_CPU = 1e-5
FLOAT32_GPU = 1e-4
HALF_EXPECTED = 6e-3
HALF = 1e-2
HALF_STATE = {torch.bfloat16: 4e-3, torch.float16: 5e-4}

_INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def relative_error(actual: Tensor, exact: Tensor) -> float:
    """‖actual − exact‖ / ‖exact‖; 0 if both are zero, inf if only ``exact`` is zero."""
    actual, exact = _pair(actual, exact, "relative_error")
    return _ratio((actual - exact).norm().item(), exact.norm().item())


def largest_error(actual: Tensor, exact: Tensor) -> float:
    """The largest |actual − exact|, relative to |exact| or the RMS of ``exact``, if larger."""
    actual, exact = _pair(actual, exact, "largest_error")
    if exact.numel() == 0:
        return 0.0
    scale = exact.abs().clamp(min=exact.square().mean().sqrt().item())
    error = (actual - exact).abs()
    quotient = torch.where(error == 0, error, error / scale)
    return quotient.max().item()


def tolerance(
    dtype: torch.dtype,
    state_dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> float:
    """The relative error that the contract allows for these dtypes.

    A state narrower than float32 adds the cost of rounding it once, at the end of one call.
    """
    if dtype == torch.float64:
        base = FLOAT64
    elif dtype == torch.float32:
        base = FLOAT32_CPU if torch.device(device).type == "cpu" else FLOAT32_GPU
    else:
        base = HALF
    return base + HALF_STATE.get(state_dtype, 0.0)


def assert_matches(
    actual: Tensor,
    exact: Tensor,
    same_dtype: Tensor | None = None,
    *,
    name: str,
    factor: float = 2.0,
    floor: float = 1e-6,
    limit: float | None = None,
    per: int | None = None,
) -> None:
    """Require ``actual`` to be as good as plain PyTorch in the same dtype.

    ``exact`` is the float64 oracle; ``same_dtype`` is the plain computation in the dtype of
    ``actual``, or the rounding of ``exact`` to it when not given. The relative error may be
    ``factor`` times that of ``same_dtype``, plus ``floor``; the largest single error may be
    ``limit``, by default 32 times as much.
    """
    _assert_comparable(actual, exact, name)
    if same_dtype is None:
        same_dtype = exact.to(actual.dtype)
    _assert_comparable(same_dtype, exact, f"{name} (plain PyTorch)")
    budget = factor * relative_error(same_dtype, exact) + floor
    _assert_budget(actual, exact, budget, limit, per, name)


def assert_within(
    actual: Tensor,
    exact: Tensor,
    tolerance: float,
    *,
    name: str,
    limit: float | None = None,
    per: int | None = None,
) -> None:
    """Require a relative error of at most ``tolerance`` and no single error beyond ``limit``."""
    _assert_comparable(actual, exact, name)
    _assert_budget(actual, exact, tolerance, limit, per, name)


def assert_same_bits(a: Tensor, b: Tensor, name: str) -> None:
    """Require equal bits; a NaN equals the same NaN, and 0.0 differs from -0.0."""
    _require(a.dtype == b.dtype, f"{name}: dtype {a.dtype} != {b.dtype}")
    _require(a.shape == b.shape, f"{name}: shape {tuple(a.shape)} != {tuple(b.shape)}")
    differ = _bits(a) != _bits(b.to(a.device))
    count = int(differ.sum())
    if count:
        where = [tuple(index) for index in differ.nonzero()[:4].tolist()]
        first = where[0]
        raise AssertionError(
            f"{name}: {count} of {a.numel()} elements differ, first at {where}: "
            f"{a[first].item()} != {b[first].item()}"
        )


def _assert_comparable(actual: Tensor, exact: Tensor, name: str) -> None:
    shapes = f"{tuple(actual.shape)} != {tuple(exact.shape)}"
    _require(actual.shape == exact.shape, f"{name}: shape {shapes}")
    bad = int((~torch.isfinite(actual)).sum())
    _require(bad == 0, f"{name}: {bad} of {actual.numel()} elements are not finite")
    _require(bool(torch.isfinite(exact).all()), f"{name}: the oracle itself is not finite")


def _assert_budget(
    actual: Tensor, exact: Tensor, budget: float, limit: float | None, per: int | None, name: str
) -> None:
    error = relative_error(actual, exact)
    _require(error <= budget, f"{name}: relative error {error:.2e} > {budget:.2e}")
    if per is not None:
        pairs = zip(actual.unbind(per), exact.unbind(per), strict=True)
        for i, error in enumerate(relative_error(a, e) for a, e in pairs):
            where = f"{name}: slice {i} of dimension {per}"
            most = SLICE * budget
            _require(error <= most, f"{where}: relative error {error:.2e} > {most:.2e}")
    limit = PEAK * budget if limit is None else limit
    peak = largest_error(actual, exact)
    _require(peak <= limit, f"{name}: largest error {peak:.2e} > {limit:.2e}")


def _pair(actual: Tensor, exact: Tensor, name: str) -> tuple[Tensor, Tensor]:
    shapes = f"{tuple(actual.shape)} != {tuple(exact.shape)}"
    _require(actual.shape == exact.shape, f"{name}: shape {shapes}")
    exact = exact.detach().to(torch.float64)
    return actual.detach().to(exact.device, torch.float64), exact


def _ratio(error: float, size: float) -> float:
    if size == 0.0:
        return 0.0 if error == 0.0 else float("inf")
    return error / size


def _bits(x: Tensor) -> Tensor:
    return x.detach().contiguous().view(_INTS[x.element_size()])


def _require(condition: bool, message: str) -> None:
    # Not a bare assert, which python -O removes.
    if not condition:
        raise AssertionError(message)
