"""Kernels that come compiled, in a package of their own: no compiler is needed to launch them.

``make kernels`` builds the package (packages/kernels). It holds machine code in one file per kernel
and a manifest: for which sources and targets, by which Triton, each kernel's parameters, and each
file's hash. A package made from other sources than those installed here is not used, and neither is
a file whose hash is another.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sluice import settings
from sluice.backends.triton import gpu

PACKAGE, DISTRIBUTION = "sluice_kernels", "sluice-gdn-kernels"
MANIFEST, FORMAT = "manifest.json", 1
TARGETS = {
    (8, 0): "sm_80",
    (8, 9): "sm_89",
    (9, 0): "sm_90a",
    (10, 0): "sm_100",
    (12, 0): "sm_120",
}
"""By compute capability."""
SOURCES = ("backends/triton/kernels", "backends/hopper/kernels", "contract/chunk_length.py")
"""What kernels are made of."""


class MachineCode(NamedTuple):
    """A kernel as the CUDA driver loads it, and what it is launched with."""

    cubin: bytes
    name: str
    num_warps: int
    shared: int
    boxes: tuple[tuple[int, int], ...]  # of its TMA descriptors, in order


class Shipped:
    """The compiled kernels in one directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.manifest: dict[str, Any] = json.loads((directory / MANIFEST).read_text("utf-8"))
        if self.manifest["format"] != FORMAT:
            raise ValueError(f"{MANIFEST} has format {self.manifest['format']}, not {FORMAT}")
        if not _is_whole(self.manifest):
            raise ValueError(f"{MANIFEST} is damaged")

    @property
    def triton(self) -> str:
        """The Triton that compiled them."""
        version: str = self.manifest["triton"]
        return version

    def serves(self, key: str, target: str) -> bool:
        """Whether it has a variant (``Variant.key``) for a target."""
        return key in self.manifest["targets"].get(target, {"kernels": {}})["kernels"]

    def code(self, key: str, target: str) -> MachineCode:
        """The machine code of a variant, its hash checked."""
        entry = self.manifest["targets"][target]["kernels"][key]
        try:
            told = str(entry["sha256"])
            path = self.directory / target / f"{told[:32]}.cubin"
            cubin = path.read_bytes()
            found = hashlib.sha256(cubin).hexdigest()
            name, num_warps, shared = str(entry["name"]), int(entry["num_warps"]), entry["shared"]
            boxes = tuple((int(rows), int(columns)) for rows, columns in entry["boxes"])
            code = MachineCode(cubin, name, num_warps, int(shared), boxes)
        except (OSError, LookupError, TypeError, ValueError) as error:
            where = f"{self.directory / target}: a kernel cannot be read ({error!r})"
            raise DamagedKernelError(f"{where}; install {DISTRIBUTION} again") from error
        if found != told:
            raise DamagedKernelError(
                f"{path}: its SHA-256 is {found}, the manifest says {told}; "
                f"install {DISTRIBUTION} again"
            )
        return code


class DamagedKernelError(RuntimeError):
    """A file of compiled kernels is not what its manifest says."""


def _is_whole(manifest: dict[str, Any]) -> bool:
    """Whether a manifest has all fields that are read later, except the kernels' own entries."""
    targets, parameters = manifest.get("targets"), manifest.get("parameters")
    return (
        isinstance(targets, dict)
        and isinstance(parameters, dict)
        and re.match(r"\d+\.\d+", str(manifest.get("triton"))) is not None
        and all(isinstance(each, list) for each in parameters.values())
        and all(
            isinstance(each, list) and len(each) == 4 for x in parameters.values() for each in x
        )
        and all(
            isinstance(target, dict) and isinstance(target.get("kernels"), dict)
            for target in targets.values()
        )
        and all("status" in target for target in targets.values())
    )


@functools.cache
def source_hash() -> str:
    """The SHA-256 of the sources that kernels are made of."""
    root = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for source in SOURCES:
        path = root / source
        for file in sorted(path.glob("*.py")) if path.is_dir() else [path]:
            digest.update(f"{file.relative_to(root).as_posix()}\n".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()


@functools.cache
def _look() -> tuple[Shipped | None, str | None]:
    """The compiled kernels that are used here, or why there are none."""
    directory = settings.kernels_directory()
    if directory is None:
        try:
            found = importlib.util.find_spec(PACKAGE)
        except ImportError:
            found = None
        if found is None or not found.submodule_search_locations:
            return None, f"the package {DISTRIBUTION} is not installed"
        directory = found.submodule_search_locations[0]
    elif not directory:
        return None, "SLUICE_KERNELS is empty"
    if told := settings.triton_settings():
        return None, f"{', '.join(told)} asks for Triton's compiler"
    try:
        kernels = Shipped(Path(directory))
        sources = kernels.manifest["sources"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        return None, f"the compiled kernels in {directory} cannot be read: {error!r}"
    if sources != source_hash():
        return None, f"the compiled kernels in {directory} are of another version of sluice"
    return kernels, None


def installed() -> Shipped | None:
    """The compiled kernels that are used here."""
    return _look()[0]


def unused() -> str | None:
    """Why no compiled kernels are used here; None if some are."""
    return _look()[1]


def target(device: torch.device) -> str | None:
    """The name of a GPU's target, if kernels are compiled for it."""
    return TARGETS.get(gpu.capability(device))


def serves(key: str, device: torch.device) -> bool:
    """Whether a variant comes compiled for a GPU."""
    kernels, name = installed(), target(device)
    return kernels is not None and name is not None and kernels.serves(key, name)


def code(key: str, device: torch.device) -> MachineCode | None:
    """The machine code of a variant on a GPU; None if it does not come compiled."""
    kernels, name = installed(), target(device)
    if kernels is None or name is None or not kernels.serves(key, name):
        return None
    return kernels.code(key, name)


def parameters(kernel: str) -> tuple[tuple[str, bool, bool, bool], ...] | None:
    """A kernel's parameters by the manifest (see ``variants.parameters``)."""
    kernels = installed()
    told = None if kernels is None else kernels.manifest["parameters"].get(kernel)
    if told is None:
        return None
    return tuple((name, bool(a), bool(b), bool(c)) for name, a, b, c in told)


def forget() -> None:
    """Look for compiled kernels again, for tests."""
    _look.cache_clear()
