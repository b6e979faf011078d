"""Faults as data: what changes in which file, why it matters, and which tests must notice.

Each ``*.toml`` beside this file lists faults of one part of the library:

    [[fault]]
    id = "pool-keeps-a-freed-slot"       # unique
    kind = "slot left behind"            # the kind of mistake
    file = "src/sluice/state_pool.py"    # what is changed
    old = '''the exact text'''           # occurs once in the file
    new = '''the text in its place'''
    why = "what a user would meet"
    row = [18]                           # of docs/reliability.md, where it is one of these
    tests = ["tests/state_pool/test_pool.py::test_a_name"]   # of which at least one must fail
    by = "tests/state_pool/test_pool.py::test_a_name[case]"  # the one that did; it is tried first
    only = "cpu"                         # pytest's -k, where tests have more cases than needed
    interpret = true                     # the kernels of Triton run in its interpreter
    gpu = true                           # needs a GPU; left out where there is none
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, field, replace
from pathlib import Path

import tomllib

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TIMED_OUT = 1000
"""The exit status of tests that did not end in time."""


@dataclass(frozen=True)
class Fault:
    """One change of one file, and the tests that must notice it."""

    id: str
    kind: str
    file: str
    old: str
    new: str
    why: str
    tests: tuple[str, ...]
    by: str = ""
    row: tuple[int, ...] = field(default=())
    only: str = ""
    interpret: bool = False
    gpu: bool = False

    def applied(self, text: str) -> str:
        """The file's text with the fault in it. ValueError where it no longer fits."""
        count = text.count(self.old)
        if count != 1:
            raise ValueError(f"{self.id}: its text occurs {count} times in {self.file}, not once")
        if self.old == self.new:
            raise ValueError(f"{self.id}: it changes nothing")
        return text.replace(self.old, self.new)

    @property
    def digest(self) -> str:
        """Equal for equal faults."""
        return hashlib.sha256(repr(replace(self, by="")).encode()).hexdigest()[:16]


def read(folder: Path = HERE) -> list[Fault]:
    """Every fault, in the order of the files. ValueError for an id that occurs twice."""
    found: dict[str, Fault] = {}
    for path in sorted(folder.glob("*.toml")):
        for entry in tomllib.loads(path.read_text("utf-8"))["fault"]:
            made = dict(entry)
            for name in ("tests", "row"):
                made[name] = tuple(made.get(name, ()))
            fault = Fault(**made)
            if fault.id in found:
                raise ValueError(f"{path.name}: the id {fault.id!r} occurs twice")
            found[fault.id] = fault
    return list(found.values())


def sample(faults: list[Fault], number: int, seed: str) -> list[Fault]:
    """Some of the faults, the same for the same seed, in their order."""
    chosen = random.Random(seed).sample(range(len(faults)), min(number, len(faults)))
    return [faults[i] for i in sorted(chosen)]


def record(noticed: dict[str, str], folder: Path = HERE) -> None:
    """Write the test that noticed each fault into its entry."""
    for path in sorted(folder.glob("*.toml")):
        first, *entries = path.read_text("utf-8").split("[[fault]]\n")
        for i, entry in enumerate(entries):
            fault = tomllib.loads(entry)
            test = noticed.get(fault["id"], "")
            if "::" not in test or test == fault.get("by") or "'" in test:
                continue
            kept = [line for line in entry.rstrip().split("\n") if not line.startswith("by = ")]
            space = "\n\n" if i + 1 < len(entries) else "\n"
            entries[i] = "\n".join([*kept, f"by = '{test}'"]) + space
        path.write_text("[[fault]]\n".join([first, *entries]), "utf-8")


def listed(faults: list[Fault]) -> str:
    """The faults that stand for each row of docs/reliability.md, as Markdown."""
    rows: dict[int, list[str]] = {}
    for fault in faults:
        for row in fault.row:
            rows.setdefault(row, []).append(f"`{fault.id}`")
    return "\n".join(f"- {row}: {', '.join(rows[row])}" for row in sorted(rows))


if __name__ == "__main__":
    print(listed(read()))
