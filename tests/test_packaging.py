"""What an installed package says of itself: name, version, extras, links, archives."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import sluice

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
TEXTS = [
    path
    for pattern in ("*.md", "docs/**/*.md", "src/**/*.py", "examples/*.py", ".github/**/*.md")
    for path in ROOT.glob(pattern)
]
INSTALLED = re.compile(r"""pip install (?:-\S+ )*["']?([\w.-]+)\[([\w,]+)\]""")


def test_the_version_is_written_once():
    found = [
        path.relative_to(ROOT).as_posix()
        for path in [*ROOT.glob("src/**/*.py"), ROOT / "pyproject.toml", ROOT / "setup.py"]
        if f'"{sluice.__version__}"' in path.read_text(encoding="utf-8")
    ]
    assert found == ["src/sluice/version.py"]
    kernels = runpy.run_path(str(ROOT / "packages/kernels/sluice_kernels/__init__.py"))
    assert kernels["__version__"] == sluice.__version__  # another distribution, the same release
    assert "version" in PROJECT["dynamic"]


def _wrong(text: str) -> list[str]:
    """Commands that would install another project, or ask for an extra that does not exist."""
    found = [
        f"{name}[{extras}]"
        for name, extras in INSTALLED.findall(text)
        if name not in (PROJECT["name"], ".") or set(extras.split(",")) - EXTRAS.keys()
    ]
    return found + re.findall(r"pip install (?:-\S+ )*sluice(?![-\w/])", text)


def test_every_command_that_installs_names_this_distribution_and_extras_it_has():
    wrong = {path.name: bad for path in TEXTS if (bad := _wrong(path.read_text(encoding="utf-8")))}
    assert not wrong


def test_a_command_that_installs_another_project_is_found():
    other = "sluice"
    assert _wrong(f"pip install '{other}[cpu]'")
    assert _wrong(f"pip install {other}\n")
    assert _wrong("pip install 'sluice-gdn[no_such_extra]'")
    assert not _wrong("pip install 'sluice-gdn[cpu,cli]' and pip install '.[onnx]'")


def test_users_of_transformers_get_the_kernels_for_a_cpu():
    assert "sluice-gdn[cpu]" in EXTRAS["transformers"]


def test_the_table_of_versions_has_what_is_tested_and_what_is_allowed():
    """docs/install.md against constraints.txt, the Makefile's OLDEST and pyproject.toml."""
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8").split("## Versions")[1]
    table = re.findall(
        r"^\| (\w+) \| ([\d.]+)(?: to ([\d.]+))?[^|]*\| (\S+) \| (\S+) \|$", page, re.M
    )
    pinned = re.compile(r"^([\w-]+)==(\S+)$", re.MULTILINE)
    newest = dict(pinned.findall((ROOT / "constraints.txt").read_text(encoding="utf-8")))
    make = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ")
    (listed,) = re.findall(r"^OLDEST +:= (.*)$", make, re.MULTILINE)
    oldest = dict(pinned.findall("\n".join(listed.split())))
    needs = [*PROJECT["dependencies"], *(x for extra in EXTRAS.values() for x in extra)]
    rows = {name.lower(): rest for name, *rest in table}
    python = rows.pop("python")
    assert rows.keys() == oldest.keys()
    for name, (least, below, first, last) in rows.items():
        assert (first, last) == (oldest[name], newest[name])
        assert first.startswith(least)
        assert any(re.match(rf"{name}>={re.escape(least)}\b", need) for need in needs)
        if below:
            major, minor = below.split(".")
            assert any(f"<{major}.{int(minor) + 1}" in need for need in needs if name in need)
            assert last.startswith(below)
    stated = [x.split()[-1] for x in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", x)]
    assert (python[0], python[1]) == (python[2], python[3]) == (stated[0], stated[-1])
    assert PROJECT["requires-python"] == f">={python[0]}"
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    assert all(f'"{version}"' in workflow for version in stated)
    listed = re.split(r"^  (\w+):$", workflow.split("\njobs:\n")[1], flags=re.M)[1:]
    runs = [re.findall(r"- run: (make \w+|\S+)", steps)[-1] for steps in listed[1::2]]
    jobs = dict(zip(listed[::2], runs, strict=True))
    runs = {"test": ".ci/run", "oldest": ".ci/oldest", "engines": ".ci/engines"}
    assert jobs == runs | {"wheels": "make wheel"}
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.M)) == set(jobs)


def _setup():
    code = (ROOT / "setup.py").read_text(encoding="utf-8")
    names: dict = {"__name__": "setup", "__file__": str(ROOT / "setup.py")}
    exec(compile(code, "setup.py", "exec"), names)
    return names


def test_the_readme_of_a_package_index_has_no_relative_links():
    pytest.importorskip("setuptools")
    setup = _setup()
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    link = re.compile(r"\]\((?!https?://|#)|(?:src|srcset)=\"(?!https?://)")
    assert link.search(text)
    for repository in ("", "https://example.org/sluice"):
        shown = setup["readme"](text, repository)
        assert not link.search(shown)
        assert ("example.org/sluice/blob/main/docs/" in shown) == bool(repository)
    assert setup["urls"]("") == {}
    assert setup["urls"]("https://example.org/s")["Issues"] == "https://example.org/s/issues"


def test_the_source_distribution_has_every_file_of_the_repository():
    """MANIFEST.in against the repository's own list; ``make wheel`` looks at the archive."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a clone")
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split()
    kept = set()
    for line in (ROOT / "MANIFEST.in").read_text(encoding="utf-8").splitlines():
        command, *words = line.split() or ["#"]
        if command == "include":
            kept |= {name for name in listed for w in words if Path(name).match(w)}
        elif command == "graft":
            kept |= {name for name in listed for w in words if name.startswith(f"{w}/")}
    always = {"pyproject.toml", "README.md", "LICENSE", "MANIFEST.in", "setup.py"}
    assert {n for n in listed if not n.startswith("packages/")} - kept - always == {".gitignore"}
