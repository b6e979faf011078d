"""Checks of plain arguments, of functions that are no operators: each raises ``ContractError``."""

from __future__ import annotations

import os
from typing import Any

import torch

from sluice.contract.errors import ContractError


def integer(op: str, argument: str, value: Any, least: int) -> None:
    """Require an int of at least ``least``; True is none."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ContractError(op, argument, f"an int of at least {least}", shown(value))


def instance(op: str, argument: str, value: Any, kind: type, expected: str) -> None:
    """Require an object of a type."""
    if not isinstance(value, kind):
        raise ContractError(op, argument, expected, shown(value))


def device(op: str, value: Any, argument: str = "device") -> torch.device:
    """Require the name of a device, or the device itself."""
    if isinstance(value, (str, torch.device)):
        try:
            return torch.device(value)
        except RuntimeError:
            pass
    raise ContractError(op, argument, "a device, such as 'cpu' or 'cuda:1'", shown(value))


def present(op: str, value: Any, argument: str = "device") -> torch.device:
    """Require a device that this machine has."""
    found = device(op, value, argument)
    try:
        torch.empty(0, device=found)
    except (AssertionError, RuntimeError) as error:  # the first: a torch without CUDA
        why = str(error).partition("\n")[0]
        expected = "a device of this machine"
        raise ContractError(op, argument, expected, f"{shown(value)}: {why}") from error
    return found


def path(op: str, value: Any, argument: str = "path") -> None:
    """Require a path, as text or as an object."""
    if not isinstance(value, (str, os.PathLike)) or "\0" in os.fspath(value):
        raise ContractError(op, argument, "a path", shown(value))


def shown(value: object) -> str:
    """A value in a message: tensors by their looks alone."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
