"""Each fault has a test that names its row, those that only a GPU can show in tests/gpu."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROWS = range(1, 34)
TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def named() -> set[int]:
    """The rows in names of test functions under tests/."""
    pattern = re.compile(r"^\s*def test_(?:\w+_)?row_(\d+)", re.MULTILINE)
    files = sorted(TESTS.rglob("test_*.py"))
    return {int(number) for file in files for number in pattern.findall(file.read_text("utf-8"))}


@pytest.mark.parametrize("row", ROWS)
def test_a_test_names_the_row(row, named):
    assert row in named
