"""Docstrings of this library as the documentation site shows them (a griffe extension).

They are written to be read in a terminal: ``::`` before an equation, ``:func:`` before a name,
examples as they would be typed.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

LITERAL = re.compile(r"^( *)(.*?)::\n(?=\n)", re.MULTILINE)
EXAMPLE = re.compile(r"^>>> .*\n(?:.+\n?)*", re.MULTILINE)
ROLE = re.compile(r":(?:func|class|meth|mod|attr):`~?([\w.]+)`")


class Docstrings(Extension):
    """Rewrites every docstring before it is rendered."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Called once for each object."""
        if obj.docstring is not None:
            text = LITERAL.sub(_opening, obj.docstring.value)
            text = EXAMPLE.sub(lambda found: f"```pycon\n{found[0].rstrip()}\n```\n", text)
            obj.docstring.value = ROLE.sub(lambda found: f"`{found[1]}`", text)


def _opening(found: re.Match[str]) -> str:
    """An equation's text before it, without the sign that an equation follows."""
    return f"{found[1]}{found[2]}:\n" if found[2] else "\n"
