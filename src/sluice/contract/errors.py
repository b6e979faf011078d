"""Errors. Each names the argument, what was expected and what came."""

from __future__ import annotations


class SluiceError(Exception):
    """Base of every error this library raises on purpose."""


class ContractError(SluiceError, ValueError):
    """An argument does not keep the operator contract (docs/contract.md)."""

    def __init__(self, op: str, argument: str, expected: str, got: object) -> None:
        self.op, self.argument, self.expected, self.got = op, argument, expected, got
        super().__init__(f"{op}: {argument}: expected {expected}, got {got}")


class BackendError(SluiceError, RuntimeError):
    """No backend serves the call, or the one that was asked for refuses it."""


class GaveUpError(BackendError):
    """A backend tried its kernels and they do not work here: from now on it is unavailable."""


class SlowPathWarning(UserWarning):
    """A slower backend serves this call; the message says which, and why the faster ones do not."""
