"""Run tests on shipped kernels alone: those that the same tests compiled in a run before.

    PYTHONPATH=.:src pytest -p tests.gpu.shipping --keep-kernels DIR tests/test_contract.py
    PYTHONPATH=.:src python -m tests.gpu.shipping DIR
    PYTHONPATH=tools/triton_is_missing:src SLUICE_KERNELS=DIR pytest tests/test_contract.py

The first keeps what Triton compiles, the second writes the manifest, and in the third no process
can import Triton (``make test-shipped``). What the package of a release lacks, calls of other
widths and options, is so tested, too.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from sluice.backends.triton import launch, shipped, toolchain, variants

_kept: dict[variants.Variant, shipped.MachineCode] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--keep-kernels", metavar="DIR", help="keep the kernels that are compiled")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.keep_kernels is None:
        return
    found = launch._machine_codes

    def keep(needed: Any, device: Any) -> Any:
        codes = list(found(needed, device))
        _kept.update(zip(needed, codes, strict=True))
        return codes

    launch._machine_codes = keep


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Each process writes what it has compiled: files, and a list of them."""
    if session.config.option.keep_kernels is None or not _kept:
        return
    out = Path(session.config.option.keep_kernels)
    told: dict[str, Any] = {"parameters": {}, "kernels": {}}
    for variant, code in _kept.items():
        digest = hashlib.sha256(code.cubin).hexdigest()
        folder = out / "sm_90a"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{digest[:32]}.cubin").write_bytes(code.cubin)
        entry = {**code._asdict(), "sha256": digest, "bytes": len(code.cubin)}
        del entry["cubin"]
        told["kernels"][variant.key] = entry
        told["parameters"][variant.kernel.name] = variants.parameters(variant.kernel)
    worker = getattr(session.config, "workerinput", {}).get("workerid", "alone")
    (out / f"{worker}.part").write_text(json.dumps(told), "utf-8")


def main() -> None:
    """Write the manifest of all processes' kernels."""
    out = Path(sys.argv[1])
    parameters: dict[str, Any] = {}
    kernels: dict[str, Any] = {}
    for part in sorted(out.glob("*.part")):
        told = json.loads(part.read_text("utf-8"))
        parameters.update(told["parameters"])
        kernels.update(told["kernels"])
        part.unlink()
    manifest = {
        "format": shipped.FORMAT,
        "sources": shipped.source_hash(),
        "triton": toolchain.version(),
        "parameters": parameters,
        "targets": {"sm_90a": {"status": "tests", "kernels": kernels}},
    }
    (out / shipped.MANIFEST).write_text(json.dumps(manifest), "utf-8")
    print(f"{len(kernels)} kernels in {out}")  # noqa: T201


if __name__ == "__main__":
    main()
