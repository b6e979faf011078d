"""The base of all providers: how a library is found, and how it runs one workload.

In ``prepare``, outside the timed region, a provider converts the canonical inputs to its library's
layout and notes what it converted. Only ``Call.run`` is timed.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from sluice.testing.case import Case
from sluice.testing.workload import Workload


class RefusalError(Exception):
    """The library cannot do this work; the text says why."""


@dataclass
class Job:
    """One set of inputs of one workload, for one provider.

    ``shared`` is one dictionary for all sets of a workload. It holds the index tensors, because
    some peers cache what they derive from one by tensor identity.
    """

    workload: Workload
    dtype: torch.dtype
    device: torch.device
    inputs: dict[str, Any]
    threads: int = 1
    shared: dict[str, Any] = field(default_factory=dict)

    @property
    def case(self) -> Case:
        return self.workload.case

    @property
    def op(self) -> str:
        return self.workload.op

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """A value that is made for the first set and shared by the others."""
        if name not in self.shared:
            self.shared[name] = make()
        return self.shared[name]

    def rows(self, name: str = "state") -> Tensor:
        """The rows of a pool in sequence order: a copy [N, ..]."""
        return self.inputs[name][self.inputs["slots"].long()].clone()


@dataclass
class Call:
    """Something to time, and how to read its result.

    ``outputs(result)`` gives the outputs by their canonical names and shapes, and the states as
    rows in sequence order. ``mutable`` are the tensors that ``run`` updates in place. ``run``
    allocates its other outputs, as a user's call does: eager calls are timed too.
    """

    run: Callable[[], Any]
    outputs: Callable[[Any], dict[str, Tensor]]
    converted: tuple[str, ...] = ()
    mutable: tuple[Tensor, ...] = ()
    detail: str = ""


class Provider:
    """A library to measure. Importing this module imports none of them."""

    name = ""
    title = ""
    package = ""  # imported to see whether it is installed
    distribution = ""  # the name for its version
    install = ""  # how to get it
    devices: tuple[str, ...] = ("cpu", "cuda")
    is_peer = True
    raw_prefill = False  # whether prefill computes gates and unit keys itself
    # Other processes find what it compiles ("disk"), or only its own does ("process"), or compiling
    # takes no time (""). This decides how it is prepared before the first row.
    compiles = ""
    # Operators whose kernels it tunes, for which it needs the device alone.
    tunes: tuple[str, ...] = ()

    def helper(self, workload: Workload) -> Hashable | None:
        """The helper that compiles a workload ahead; equal results share a process.

        None if only the provider's own process can compile it.
        """
        return None

    def kernels(self, workload: Workload) -> Hashable:
        """What its kernels depend on: of workloads with equal results, one is tuned."""
        return workload.name

    def tuned_at(self, workloads: list[Workload]) -> Workload:
        """The workload at which kernels shared by these are tuned: the surface's first."""
        return workloads[0]

    def missing(self) -> str | None:
        """Why it cannot be used here; None if it can."""
        try:
            importlib.import_module(self.package)
        except Exception as error:  # a broken install raises anything: OSError, RuntimeError, ...
            said = str(error).strip().splitlines()
            return ": ".join([type(error).__name__, *said[:1]])[:200]
        return None

    def version(self) -> str:
        """The version of the distribution, or of the module without one."""
        try:
            return importlib.metadata.version(self.distribution or self.package)
        except importlib.metadata.PackageNotFoundError:
            module = importlib.import_module(self.package.split(".")[0])
            return str(getattr(module, "__version__", "unknown"))

    def prepare(self, job: Job) -> Call:
        """The call for one set of inputs, or ``RefusalError``; ``_<op>`` serves an operator."""
        if job.op == "prefill" and job.case.raw and not self.raw_prefill:
            raise RefusalError("takes finished gates: a raw prefill would be several calls")
        method: Callable[[Job], Call] | None = getattr(self, f"_{job.op}", None)
        if method is None:
            raise RefusalError(f"has no {job.op}")
        return method(job)


def load(name: str) -> ModuleType:
    """Import a module on use, so that a library is imported only when it is measured."""
    return importlib.import_module(name)


def heads_of(mixed: Tensor, case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """q, k [.., Hk, K] and v [.., Hv, V]: views of a convolution's channels [Q | K | V]."""
    c = case
    q, k, v = mixed.split([c.Hk * c.K, c.Hk * c.K, c.Hv * c.V], dim=-1)
    return q.unflatten(-1, (c.Hk, c.K)), k.unflatten(-1, (c.Hk, c.K)), v.unflatten(-1, (c.Hv, c.V))


def raw_gates(i: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """g and beta of conv_qkv in plain torch and float32, for peers without gates in the conv."""
    rate = -i["A_log"].float().exp()
    g = rate * torch.nn.functional.softplus(i["a"].float() + i["dt_bias"])
    return g, i["b"].float().sigmoid()


def equal_lengths(job: Job) -> tuple[int, int] | None:
    """(N, T) if all prompts have one length, so that a view makes them a batch; else None."""
    lengths = set(job.case.sequence_lengths)
    return (job.case.N, lengths.pop()) if len(lengths) == 1 else None


def as_batch(x: Tensor, N: int, T: int) -> Tensor:
    """[1, N·T, ..] as [N, T, ..], without a copy."""
    return x.reshape(N, T, *x.shape[2:])


def spans(job: Job) -> list[slice]:
    """Where each packed prompt lies."""
    ends = torch.tensor(job.case.sequence_lengths).cumsum(0).tolist()
    return [slice(a, b) for a, b in zip([0, *ends[:-1]], ends, strict=True)]
