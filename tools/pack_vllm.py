"""vLLM's Python files and the packages they import, in one archive for ``benchmarks/gpu_vllm.py``.

    python tools/pack_vllm.py CHECKOUT vllm026.tar.xz [--python 3.12]

CHECKOUT is a checkout of vLLM at a release; nothing in it is compiled. Packages come from pip, for
the Python and the Linux of the machine that will unpack the archive. Packages that the layer never
uses are not taken along: the benchmark makes them up.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

PACKAGES = (
    "annotated-types", "cachetools", "cbor2", "certifi", "charset-normalizer", "cloudpickle",
    "einops", "idna", "msgspec", "psutil", "py-cpuinfo", "pybase64", "pydantic", "pyzmq",
    "requests", "typing-extensions", "typing-inspection", "urllib3",
)  # fmt: skip
"""Without what torch, transformers and numba bring."""


def version_of(checkout: Path) -> str:
    command = ["git", "-C", str(checkout), "describe", "--tags", "--exact-match"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()[1:]


def copy_vllm(checkout: Path, folder: Path, version: str) -> None:
    """Python files alone, and what a build would write beside them."""
    for path in (checkout / "vllm").rglob("*.py"):
        to = folder / path.relative_to(checkout)
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, to)
    numbers = tuple(int(x) for x in version.split("."))
    text = f'__version__ = "{version}"\n__version_tuple__ = {numbers}\n'
    (folder / "vllm" / "_version.py").write_text(text, "utf-8")
    about = folder / f"vllm-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n", "utf-8"
    )


def add_packages(folder: Path, python: str) -> None:
    """pydantic's compiled half has to be the release that pydantic names, so pip chooses it."""
    target = [
        "--target", str(folder), "--python-version", python, "--only-binary", ":all:",
        "--platform", "manylinux_2_28_x86_64", "--platform", "manylinux_2_17_x86_64",
        "--platform", "manylinux2014_x86_64", "--no-compile", "--quiet",
    ]  # fmt: skip
    subprocess.run([sys.executable, "-m", "pip", "install", *target, *PACKAGES], check=True)
    shutil.rmtree(folder / "bin", ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("archive", type=Path)
    parser.add_argument("--python", default="3.12")
    parser.add_argument("--version", help="of vLLM, where the checkout has no tag")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        copy_vllm(args.checkout, folder, args.version or version_of(args.checkout))
        add_packages(folder, args.python)
        with tarfile.open(args.archive, "w:xz") as archive:
            archive.add(folder, arcname=".")
    print(f"{args.archive}: {args.archive.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
