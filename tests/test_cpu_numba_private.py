"""What the CPU backend uses of Numba that is not public: loud where one of them is gone."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

pytest.importorskip("numba")

from numba.core import codegen, registry

import sluice
from sluice import calls
from sluice.backends import cpu
from sluice.backends.cpu import numba_private

FOLDER = Path(numba_private.__file__).parent
PUBLIC = {"numba", "numba.extending"}


def test_numba_says_what_it_compiles_for():
    assert registry.cpu_target.target_context.codegen().magic_tuple()[0]
    assert numba_private.TARGET.triple.count("-") >= 2
    assert all(feature[0] in "+-" for feature in numba_private.TARGET.features if feature)


def test_a_callback_has_what_keeping_it_on_disk_needs():
    assert numba_private.missing() == []


def test_without_one_of_them_calls_are_refused_with_the_reason(monkeypatch):
    calls.forget()
    cpu._unusable.cache_clear()
    monkeypatch.setattr(numba_private, "CFunc", lambda *arguments: object())
    x = torch.ones(2, 4)
    with pytest.raises(sluice.BackendError, match=r"has no CFunc\._compile_uncached"):
        sluice.rms_norm_gated(x, x, torch.ones(4), backend="cpu")
    cpu._unusable.cache_clear()


def test_numba_has_every_pass_that_kernels_need():
    assert numba_private.PIPELINE is numba_private._Pipeline, "kernels compile longer without this"


def test_methods_can_be_replaced_and_are_put_back():
    assert numba_private.replaceable(), "kernels compile twice as long without this"
    before = [getattr(codegen, kind).__dict__.get(name) for kind, name, _ in numba_private.REPLACED]
    with numba_private._as_modules():
        for kind, name, function in numba_private.REPLACED:
            assert getattr(codegen, kind).__dict__[name] is function
    after = [getattr(codegen, kind).__dict__.get(name) for kind, name, _ in numba_private.REPLACED]
    assert after == before


def test_nothing_else_of_numba_is_private():
    """One module imports ``numba.core``; everything else keeps to the public interface."""
    for path in FOLDER.glob("*.py"):
        if path.name == "numba_private.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                assert not name.startswith("numba") or name in PUBLIC, f"{path.name}: {name}"
