"""What dependencies do not promise and sluice uses: it is there, and what happens without it.

A failure here says that a new version of a dependency has no such name: its module names what is
lost (``torch_private.py``, ``triton_private.py``). Numba's are in test_cpu_numba_private.py.
"""

from __future__ import annotations

import ast
import importlib
import logging
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import sluice
from sluice import torch_private

PACKAGE = Path(sluice.__file__).parent
HOMES = {
    "torch": {"torch_private.py"},
    "triton": {"backends/triton/triton_private.py", "backends/hopper/kernels/gluon_api.py"},
}
"""The only files that may use private names of a dependency."""


# ------------------------------------------------------------------------------------------- torch

TORCH = (
    "_C._len_torch_dispatch_stack",
    "_C._functorch.peek_interpreter_stack",
    "_C._get_tracing_state",
    "_C.__file__",
    "utils._pytree.tree_flatten",
    "cuda._sleep",
)


@pytest.mark.parametrize("path", TORCH)
def test_torch_has_the_private_name(path):
    found: Any = torch
    for name in path.split("."):
        found = getattr(found, name, None)
    assert found is not None, f"torch {torch.__version__} has no torch.{path}"


@pytest.mark.skipif(torch.version.cuda is None, reason="torch is built without CUDA")
def test_torch_with_cuda_has_the_handle_of_a_stream():
    assert hasattr(torch._C, "_cuda_getCurrentRawStream")


def test_the_exporter_has_the_logger():
    module = "torch.onnx._internal.exporter._registration"
    importlib.import_module(module)
    assert torch_private.exporter_logger() is logging.getLogger(module)


def test_a_module_keeps_its_parts_where_they_are_looked_up():
    layer = torch.nn.Linear(2, 2)
    layer.inner = torch.nn.Identity()
    assert torch_private.part is not getattr
    assert torch_private.part(layer, "weight") is layer.weight
    assert torch_private.part(layer, "inner") is layer.inner
    assert torch_private.part(layer, "in_features") == 2
    with pytest.raises(AttributeError):
        torch_private.part(layer, "no_such_part")


def without(monkeypatch: pytest.MonkeyPatch, path: str) -> dict[str, Any]:
    """``torch_private`` as it is where torch does not have a name."""
    owner: Any = torch
    *parts, last = path.split(".")
    for name in parts:
        owner = getattr(owner, name)
    monkeypatch.delattr(owner, last)
    return runpy.run_path(torch_private.__file__)


def test_what_follows_a_call_is_asked():
    assert torch_private.dispatch_modes() == 0
    with torch._subclasses.FakeTensorMode():
        assert torch_private.dispatch_modes() == 1
    asked = []
    torch.func.grad(lambda x: asked.append(torch_private.transform()) or x.sum())(torch.ones(2))
    assert asked[0] is not None
    assert torch_private.transform() is None
    assert torch_private.jit_trace() is None


@pytest.mark.parametrize(
    ("path", "name", "value"),
    [
        ("_C._len_torch_dispatch_stack", "dispatch_modes", 0),
        ("_C._functorch.peek_interpreter_stack", "transform", None),
        ("_C._functorch", "transform", None),
        ("_C._get_tracing_state", "jit_trace", None),
        ("_C.__file__", "extension_file", None),
    ],
)
def test_without_the_name_the_answer_is_no(monkeypatch, path, name, value):
    assert without(monkeypatch, path)[name]() == value


def test_without_the_stream_s_handle_the_public_way_is_taken(monkeypatch):
    if hasattr(torch._C, "_cuda_getCurrentRawStream"):
        monkeypatch.delattr(torch._C, "_cuda_getCurrentRawStream")
    streams = {0: SimpleNamespace(cuda_stream=70), 1: SimpleNamespace(cuda_stream=71)}
    monkeypatch.setattr(torch.cuda, "current_stream", streams.__getitem__)
    found = runpy.run_path(torch_private.__file__)
    assert [found["current_stream"](index) for index in (0, 1)] == [70, 71]


def test_without_a_pause_calls_are_timed_without_one(monkeypatch):
    without(monkeypatch, "cuda._sleep")["pause_device"](1000)


def test_without_a_module_s_dictionaries_getattr_is_used(monkeypatch):
    class Plain:
        weight = 3

    monkeypatch.setattr(torch.nn, "Module", Plain)
    part = runpy.run_path(torch_private.__file__)["part"]
    assert part is getattr
    assert part(Plain(), "weight") == 3


# ------------------------------------------------------------------------------------------ Triton


@pytest.fixture
def triton() -> Any:
    return pytest.importorskip("triton")


@pytest.fixture
def private(triton: Any) -> Any:
    return importlib.import_module("sluice.backends.triton.triton_private")


KNOBS = ("runtime.debug", "runtime.add_stages_inspection_hook", "compilation.instrumentation_mode")


@pytest.mark.parametrize("path", ["runtime", "compilation", *KNOBS])
def test_triton_has_the_knob(triton, path):
    found = triton.knobs
    for name in path.split("."):
        assert hasattr(found, name), f"Triton {triton.__version__} has no triton.knobs.{path}"
        found = getattr(found, name)


def test_triton_keeps_what_a_program_sets_in_a_dictionary_and_its_hooks_in_lists(triton, private):
    assert not private.changed()
    for knobs, name in (
        (triton.knobs.runtime, "debug"),
        (triton.knobs.compilation, "always_compile"),
    ):
        with knobs.scope():
            setattr(knobs, name, True)
            assert private.changed()
        assert not private.changed()
    for name in ("launch_enter_hook", "launch_exit_hook"):
        chain = getattr(triton.knobs.runtime, name)
        chain.add(print)
        try:
            assert private.changed()
        finally:
            chain.remove(print)
        assert not private.changed()


def test_triton_s_kernels_say_of_each_parameter_what_is_compiled(triton, private):
    if importlib.import_module("sluice.backends.triton").interpreted():
        pytest.skip("kernels have no parameters in the interpreter")
    assert private.missing() is None
    decode = importlib.import_module("sluice.backends.triton.kernels.decode").decode_kernel
    told = {p.name: p for p in decode.params}
    assert told["BLOCK_V"].is_constexpr
    assert told["N"].do_not_specialize
    assert told["slots_ptr"].do_not_specialize_on_alignment
    assert not told["state_ptr"].do_not_specialize_on_alignment
    assert decode.pre_run_hooks == []


def test_triton_has_a_source_for_kernels_of_both_languages(triton, private):
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    decode = importlib.import_module("sluice.backends.triton.kernels.decode").decode_kernel
    hopper = importlib.import_module("sluice.backends.hopper.kernels.chunks_kernel")
    chunks = hopper.hopper_chunks_kernel
    for kernel, kind in ((decode, ASTSource), (chunks, GluonASTSource)):
        source = private.source(kernel, {kernel.arg_names[0]: "*fp32"}, {}, {})
        assert type(source).__base__ is kind


def test_without_knobs_none_is_on(triton, private, monkeypatch):
    monkeypatch.delattr(triton, "knobs")
    found = runpy.run_path(private.__file__)
    assert found["changed"]() is False
    assert found["launches_itself"](SimpleNamespace()) is False


def test_without_hooks_a_kernel_has_none(private):
    assert private.hooks_of(SimpleNamespace()) == []


@pytest.mark.parametrize("lost", ["params", "do_not_specialize_on_alignment"])
def test_without_what_kernels_say_the_backend_is_unavailable_and_says_why(
    triton, private, monkeypatch, lost
):
    toolchain = importlib.import_module("sluice.backends.triton.toolchain")
    if toolchain.interpreted():
        pytest.skip("kernels have no parameters in the interpreter")
    kernel = SimpleNamespace()
    if lost != "params":
        names = (name for name in private.PARAMETER if name != lost)
        kernel.params = [SimpleNamespace(**dict.fromkeys(names))]
    monkeypatch.setattr(private, "_kernel", kernel)
    reason = toolchain.unable.__wrapped__()
    assert f"Triton {triton.__version__} does not say" in reason
    assert "do_not_specialize_on_alignment" in reason


# ---------------------------------------------------------------------------------- nowhere else


def private_names(tree: ast.AST, package: str) -> list[str]:
    """Private names of a package that a file imports or reads."""
    aliases, found = {package}, []
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
            aliases |= {a.asname for a in node.names if a.asname and a.name.startswith(package)}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == package:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            aliases |= {alias.asname or alias.name for alias in node.names}
        found += [n for n in names if n.split(".")[0] == package and _is_private(n)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            text = ast.unparse(node)
            if text.split(".")[0] in aliases and not text.split(".")[0][0].isupper():
                found.append(text)
    return found


def _is_private(path: str) -> bool:
    return any(part.startswith("_") and not part.endswith("__") for part in path.split("."))


@pytest.mark.parametrize("package", HOMES)
def test_private_names_are_used_in_one_place(package):
    found = {}
    for path in PACKAGE.rglob("*.py"):
        names = private_names(ast.parse(path.read_text(encoding="utf-8")), package)
        if names:
            found[path.relative_to(PACKAGE).as_posix()] = names
    assert set(found) == HOMES[package], found


@pytest.mark.parametrize(
    "code",
    [
        "import torch; torch._C._x()",
        "from torch._C import _x",
        "import torch._dynamo",
        "import torch as t; t.cuda._sleep(1)",
        "from torch import utils; utils._pytree.tree_flatten(x)",
    ],
)
def test_a_private_name_elsewhere_is_found(code):
    assert private_names(ast.parse(code), "torch")
    assert not private_names(ast.parse("import torch; torch.__version__; x._private"), "torch")
