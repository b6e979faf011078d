"""Optional packages that are installed and broken: sluice is imported, serves, and says why not.

Each package is broken in a process of its own, forked from one that has imported torch and
Numba: an import raises ImportError, or something that no import should raise.
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("numba")

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "triton",
    "numba",
    "llvmlite",
    "transformers",
    "onnxruntime",
    "safetensors",
    "rich",
    "fla",
    "vllm",
    "sglang",
    "onnx",
    "numpy",
    "tqdm",
)
WAYS = ("ImportError", "RuntimeError")

PROGRAM = r"""
import importlib.abc, importlib.machinery, io, json, logging, os, sys
sys.path.insert(0, sys.argv[1])
import torch
import numba  # takes a second, which every child would need

class Broken(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    "Finds a package, whose code raises."
    def __init__(self, package, error):
        self.package, self.error = package, error
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == self.package:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
    def exec_module(self, module):
        raise self.error(f"{self.package} is broken")

class Absent(importlib.abc.MetaPathFinder):
    "What takes long to import and is not looked at."
    def __init__(self, names):
        self.names = names
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

def refusal(function):
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "served"

def look(package):
    import warnings
    warnings.simplefilter("ignore")
    import sluice
    x = torch.ones(1, 3, 1, 4)
    said = {}
    o, state = sluice.prefill(x, x, x, normalize_qk=True)
    said["sum"] = float(o.sum())
    said["explain"] = str(sluice.explain("prefill", x, x, x))
    said["doctor"] = sluice.doctor("cpu")
    pool = sluice.StatePool(sluice.PoolGeometry(layers=1, num_v_heads=1, conv_channels=3,
                                                head_k_dim=1, head_v_dim=1), 1)
    pool.allocate()
    if package == "safetensors":
        said["save"] = refusal(lambda: pool.save("/nowhere/state"))
    if package == "transformers":
        from sluice import demo
        from sluice.integrations import transformers
        said["install"] = refusal(transformers.install)
        said["demo"] = refusal(demo._need_transformers)
    if package == "fla":
        from sluice.integrations import fla
        said["install"] = refusal(fla.install)
    if package in ("onnx", "onnxruntime"):
        from sluice.integrations.onnx.export import need
        said["export"] = refusal(lambda: need(package))
    if package == "vllm":
        from sluice.integrations.vllm import private
        said["missing"] = str(private.missing())
    if package == "sglang":
        from sluice.integrations.sglang import private
        said["missing"] = str(private.missing())
    if package == "rich":
        from sluice import progress
        with progress.counted() as show:
            show("a step", 0, 1)
        said["progress"] = "lines"
    return said

for package, error in json.loads(sys.argv[2]):
    read, write = os.pipe()
    if os.fork() == 0:
        try:
            os.close(read)
            for name in [n for n in sys.modules if n.split(".")[0] == package]:
                del sys.modules[name]
            slow = {"transformers", "onnxruntime", "triton"} - {package}
            sys.meta_path.insert(0, Absent(slow))
            sys.meta_path.insert(0, Broken(package, getattr(__builtins__, error)))
            said = json.dumps(look(package))
        except BaseException as found:
            import traceback
            said = json.dumps({"failed": traceback.format_exc()})
        with os.fdopen(write, "w") as pipe:
            pipe.write(said)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        print(pipe.read(), flush=True)
    os.wait()
"""


@cache
def _all() -> list[dict[str, str]]:
    pairs = [(package, way) for way in WAYS for package in PACKAGES]
    command = [sys.executable, "-c", PROGRAM, str(ROOT / "src"), json.dumps(pairs)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return list(map(json.loads, done.stdout.splitlines()))


def looked(way: str) -> dict[str, dict[str, str]]:
    """What a process said of each package that is broken in this way."""
    first = len(PACKAGES) * WAYS.index(way)
    return dict(zip(PACKAGES, _all()[first : first + len(PACKAGES)], strict=True))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("package", PACKAGES)
def test_sluice_serves_with_a_broken_package(package, way):
    said = looked(way)[package]
    assert "failed" not in said, said["failed"]
    assert said["sum"] == looked(way)["tqdm"]["sum"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("package", ["triton", "numba", "transformers", "onnxruntime"])
def test_doctor_says_that_a_package_cannot_be_imported(package, way):
    lines = looked(way)[package]["doctor"].splitlines()
    line = next(x for x in lines if x.startswith(f"  {package} "))
    assert "cannot be imported" in line
    assert f"{package} is broken" in line


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("package", ["numba", "llvmlite"])
def test_explain_says_why_the_kernels_of_a_cpu_do_not_serve(package, way):
    said = looked(way)[package]["explain"].splitlines()
    assert said[0] == "prefill: chunked"
    (line,) = (x for x in said if x.startswith("  cpu: "))
    assert f"cannot use numba: {way}" in line
    assert f"{package} is broken" in line


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("package", "where"),
    [
        ("safetensors", "save"),
        ("transformers", "install"),
        ("transformers", "demo"),
        ("fla", "install"),
        ("onnx", "export"),
        ("onnxruntime", "export"),
        ("vllm", "missing"),
        ("sglang", "missing"),
    ],
)
def test_what_needs_the_package_says_that_it_is_broken(package, where, way):
    said = looked(way)[package][where]
    assert f"{package} is broken" in said
    errors = ("SluiceError: ", "MissingDependencyError: ", "this vLLM has no", "this SGLang has no")
    assert said.startswith(errors)
