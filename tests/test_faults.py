"""The faults of tools/faults still fit the sources, name tests that exist, and cover every row."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("faults", ROOT / "tools/faults/faults.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["faults"] = module
    spec.loader.exec_module(module)
    return module


faults = _load()
FAULTS = faults.read()


@cache
def _tests_of(path: Path) -> frozenset[str]:
    tree = ast.parse(path.read_text("utf-8"))
    named = {x.name for x in ast.walk(tree) if isinstance(x, ast.FunctionDef)}
    return frozenset(named | {x.id for x in ast.walk(tree) if isinstance(x, ast.Name)})


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.id)
def test_a_fault_fits_the_sources_and_names_tests(fault):
    assert fault.file.startswith(("src/", "packages/"))
    ast.parse(fault.applied((ROOT / fault.file).read_text("utf-8")))
    assert fault.tests, "no test is named"
    for test in (*fault.tests, *filter(None, [fault.by])):
        path, _, name = test.partition("[")[0].partition("::")
        assert (ROOT / path).is_file(), path
        assert not name or name.partition("::")[0] in _tests_of(ROOT / path), test
    assert fault.kind
    assert fault.why.endswith(".")


def test_every_row_of_the_table_has_a_fault():
    text = (ROOT / "docs/reliability.md").read_text("utf-8")
    rows = {int(n) for n in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)}
    assert len(rows) >= 33
    covered = {row for fault in FAULTS for row in fault.row}
    assert rows - covered == set(), "rows without a fault"
    assert covered - rows == set(), "rows that are not in the table"


def test_the_documentation_lists_the_faults_of_each_row():
    text = (ROOT / "docs/reliability.md").read_text("utf-8")
    assert faults.listed(FAULTS) in text, "put in what `python tools/faults/faults.py` prints"


def _promises() -> list[tuple[str, list[str], list[str]]]:
    """The table of promises: each with its test files and its faults."""
    text = (ROOT / "docs/reliability.md").read_text("utf-8")
    part = text.partition("## Promises")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in part.splitlines() if line.startswith("| ")]
    return [(a, re.findall(r"`(.+?)`", b), re.findall(r"`(.+?)`", c)) for a, b, c in rows[1:]]


def test_every_promise_has_tests_and_faults_that_prove_them():
    known = {fault.id: fault for fault in FAULTS}
    assert len(_promises()) > 10
    for promise, files, proofs in _promises():
        assert files, promise
        assert proofs, promise
        for name in proofs:
            assert name in known, f"{name} is no fault"
            tests = {test.partition("::")[0].removeprefix("tests/") for test in known[name].tests}
            assert tests & set(files), f"{name}: its tests are not among those of the promise"


def test_there_are_many_and_each_part_has_some():
    assert len(FAULTS) >= 150
    parts = {fault.file.split("/")[2] for fault in FAULTS}
    assert {"contract", "dispatch.py", "calls.py", "ops", "state_pool.py", "backends"} <= parts
    assert {"layers", "integrations", "compat", "distributed"} <= parts


def test_a_fault_that_no_longer_fits_is_found():
    fault = faults.Fault("x", "kind", "file", "old", "new", "why", ("tests",))
    assert fault.applied("an old text") == "an new text"
    for text in ("nothing", "old and old"):
        with pytest.raises(ValueError, match="times in file, not once"):
            fault.applied(text)


def test_a_sample_is_the_same_on_one_day_and_another_on_the_next():
    first = faults.sample(FAULTS, 30, "2026-01-01")
    assert first == faults.sample(FAULTS, 30, "2026-01-01")
    assert len(first) == 30
    assert first != faults.sample(FAULTS, 30, "2026-01-02")
    assert len(faults.sample(FAULTS, 10**6, "any")) == len(FAULTS)
