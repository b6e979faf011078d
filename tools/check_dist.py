"""Whether what ``make wheel`` built is right: ``python tools/check_dist.py dist [PYTHON ...]``.

The source distribution must hold the files of the repository, and compiled kernels, where there are
any, every file of their manifest. Every wheel is installed into an
empty environment, where ``import sluice`` may not warn, the README's Python runs, and so do
``sluice doctor`` and ``sluice --version``; with each of the interpreters given, or with this one.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
NAME = "sluice_gdn"
KERNELS = "sluice_gdn_kernels"
NOT_SHIPPED = {".gitignore"}
"""Files of the repository that only a clone needs."""


def main(dist: Path, pythons: list[str]) -> None:
    """Check every archive in ``dist``."""
    version = re.search(
        r'__version__ = "(.+)"', (ROOT / "src" / "sluice" / "version.py").read_text()
    )
    assert version is not None
    sdist, wheel = (dist / f"{NAME}-{version[1]}{end}" for end in (".tar.gz", "-py3-none-any.whl"))
    check_sdist(sdist)
    check_wheel(wheel)
    for kernels in dist.glob(f"{KERNELS}-*.whl"):
        check_kernels(kernels)
    for python in pythons:
        check_installed(sorted(dist.glob("*.whl")), version[1], python)


def check_sdist(path: Path) -> None:
    """Nothing that the repository has is absent, and nothing is there that it does not have."""
    with tarfile.open(path) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
        folders = {m.name.split("/", 1)[1] for m in archive if m.isdir() and "/" in m.name}
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    )  # fmt: skip
    # packages/ holds other distributions, which have archives of their own
    kept = {n for n in listed.stdout.split("\n") if n and not n.startswith("packages/")}
    kept = {name for name in kept if (ROOT / name).is_file()} - NOT_SHIPPED
    made = {n for n in names if n in ("PKG-INFO", "setup.cfg") or ".egg-info" in n}
    extra = names - kept - made - folders
    assert not kept - names, f"{path.name} lacks {sorted(kept - names)}"
    assert not extra, f"{path.name} should not have {sorted(extra)}"
    print(f"{path.name}: the {len(kept)} files of the repository, {path.stat().st_size >> 10} KiB")


def check_wheel(path: Path) -> None:
    """The package and its data, no tests."""
    with zipfile.ZipFile(path) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    kept = {
        file.relative_to(ROOT / "src").as_posix()
        for file in (ROOT / "src").rglob("*")
        if file.is_file() and "__pycache__" not in file.parts  # also compiled CPU kernels
        if ".egg-info" not in file.as_posix()
    }
    assert names == kept, f"{path.name}: {sorted(names ^ kept)} differ"
    print(f"{path.name}: {len(kept)} files, {path.stat().st_size >> 10} KiB")


def check_kernels(path: Path) -> None:
    """The manifest, every file that it names, and no other."""
    with zipfile.ZipFile(path) as archive:
        names = {name for name in archive.namelist() if name.endswith((".cubin", ".json"))}
        manifest = json.loads(archive.read("sluice_kernels/manifest.json"))
        wanted = {"sluice_kernels/manifest.json"}
        for target, told in manifest["targets"].items():
            for key, entry in told["kernels"].items():
                digest = entry["sha256"]
                name = f"sluice_kernels/{target}/{digest[:32]}.cubin"
                made = hashlib.sha256(archive.read(name)).hexdigest()
                assert made == digest, f"{path.name}: {name} is not the code of {key}"
                wanted.add(name)
    assert names == wanted, f"{path.name}: {sorted(names ^ wanted)} differ"
    told = ", ".join(f"{t} {len(x['kernels'])}" for t, x in manifest["targets"].items())
    print(f"{path.name}: kernels for {told}, {path.stat().st_size / 1e6:.1f} MB")


def check_installed(wheels: list[Path], version: str, python: str) -> None:
    """The wheels in an empty environment, away from the repository."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        _run([python, "-m", "venv", "venv"], place)
        bin_ = place / "venv" / "bin"
        pip = [str(bin_ / "python"), "-m", "pip", "install", "--quiet"]
        pip += ["--disable-pip-version-check", "--constraint", str(constraints(place))]
        number = _run([python, "--version"], place).strip()
        print(f"{number}: installing into an empty environment (torch is long) ...", flush=True)
        _run([*pip, "numpy", *(str(w.resolve()) for w in wheels)], place)  # torch warns without it
        said = _run([str(bin_ / "python"), "-W", "error", "-c", "import sluice"], place)
        assert not said, said
        print("  import sluice: no warning")
        _run([str(bin_ / "python"), "-c", readme_python()], place)
        print("  the README's Python: runs")
        assert _run([str(bin_ / "sluice"), "--version"], place).strip() == f"sluice {version}"
        report = _run([str(bin_ / "sluice"), "doctor"], place)
        assert f"sluice {version}" in report
        assert "reference" in report
        if any(wheel.name.startswith(KERNELS) for wheel in wheels):
            assert "shipped kernels: by Triton" in report, report
        print("  sluice doctor:")
        print("    " + "\n    ".join(report.splitlines()[:20]))


def constraints(place: Path) -> Path:
    """The tested torch alone: not every pinned package exists for every Python."""
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    path = place / "constraints.txt"
    path.write_text("\n".join(line for line in pinned if line.startswith("torch==")) + "\n")
    return path


def readme_python() -> str:
    """All Python of the README, in its order."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert found, "README.md: no Python"
    return "".join(found)


def _run(command: list[str], place: Path) -> str:
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] or [sys.executable])
