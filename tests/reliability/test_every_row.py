"""The table of docs/reliability.md and the tests that cite its rows agree.

A test cites row 12 by its name, ``test_row_12_..`` or ``test_.._row_12``, or by its docstring,
"Reliability row 12". The tests are parsed, not imported: tests/gpu can only be imported on a GPU.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
TABLE = TESTS.parent / "docs" / "reliability.md"


@cache
def rows() -> list[tuple[int, list[str]]]:
    """Each row of the table: its number and the tests it names, as ``file.py::function``."""
    found = re.findall(r"^\| (\d+) \|(.*)\|$", TABLE.read_text("utf-8"), re.MULTILINE)
    return [(int(number), re.findall(r"`([\w/]+\.py::\w+)`", cells)) for number, cells in found]


def cited(function: ast.FunctionDef) -> set[int]:
    """The rows that a test cites."""
    numbers = re.findall(r"_row_(\d+)", function.name)
    text = " ".join((ast.get_docstring(function) or "").split())
    for several in re.findall(r"[Rr]eliability rows? (\d+(?:(?:, | and )\d+)*)", text):
        numbers += re.findall(r"\d+", several)
    return {int(number) for number in numbers}


@cache
def citations() -> dict[str, set[int]]:
    """Every test under tests/, as ``file.py::function``, and the rows it cites."""
    return {
        f"{path.relative_to(TESTS).as_posix()}::{node.name}": cited(node)
        for path in sorted(TESTS.rglob("test_*.py"))
        for node in ast.parse(path.read_text("utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def test_the_rows_are_numbered_without_gap_or_repeat():
    assert [number for number, _ in rows()] == list(range(1, len(rows()) + 1))


@pytest.mark.parametrize(("row", "tests"), rows(), ids=[f"row_{number}" for number, _ in rows()])
def test_the_tests_of_a_row_exist_and_cite_it(row, tests):
    assert tests, "the row names no test"
    assert set(tests) <= set(citations()), "the row names a test that does not exist"
    assert [name for name in tests if row not in citations()[name]] == []


def test_every_row_that_a_test_cites_is_in_the_table():
    known = {number for number, _ in rows()}
    assert {name: found - known for name, found in citations().items() if found - known} == {}


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("def test_row_07_decode(): pass", {7}),
        ("def test_padding_row_27(): pass", {27}),
        ("def test_a(): 'Reliability rows 3 and 18.'", {3, 18}),
        ("def test_a(): 'Reliability row 33: a row is timed only then.'", {33}),
        ("def test_a(): 'Row 0 starts anew.'", set()),
        ("def test_grow_3_times(): pass", set()),
    ],
)
def test_a_citation_is_found(code, expected):
    (function,) = ast.parse(code).body
    assert isinstance(function, ast.FunctionDef)
    assert cited(function) == expected
