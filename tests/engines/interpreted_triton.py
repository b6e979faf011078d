"""A plug-in of pytest: vLLM on a CPU, with all of its Triton kernels in Triton's interpreter.

``-p tests.engines.interpreted_triton`` with TRITON_INTERPRET=1. vLLM's newer model runner needs
Triton. On a CPU vLLM looks for a Triton that compiles for it, and here finds one that interprets.
The plug-in's operators stay the CPU's.
"""

from __future__ import annotations

from triton.backends import Backend, backends

from sluice.backends import triton as operators
from tests import interpreter


class Nobody:
    """The driver of a backend that nothing is compiled for."""

    @staticmethod
    def is_active() -> bool:
        return False


def pytest_configure() -> None:
    """Not at import: collecting docstring examples imports every file of the tests."""
    interpreter.hasten()
    backends["cpu"] = Backend(None, Nobody)
    operators.DEVICES = ("cuda",)
