"""The rules of the code: allowed imports, the cost and effects of an import, the length of files.

A package may import itself and packages of a lower rank in ``RANKS``. Exceptions are listed.
"""

from __future__ import annotations

import ast
import importlib.metadata
import json
import re
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

import sluice
from sluice import dispatch

PACKAGE = Path(sluice.__file__).parent
TESTS = Path(__file__).parent
ROOT = TESTS.parent
SOURCES = sorted(PACKAGE.rglob("*.py"))
TEST_FILES = sorted(TESTS.rglob("*.py"))
BENCH_FILES = [*sorted((PACKAGE / "bench").rglob("*.py")), *sorted(ROOT.glob("benchmarks/**/*.py"))]

LONGEST = 600
RANKS = {
    "contract": 0,
    "settings": 0,
    "testing": 0,
    "torch_private": 0,
    "version": 0,
    "dispatch": 1,
    "open_drafts": 1,
    "kept": 1,
    "calls": 2,
    "torch_ops": 3,
    "ops": 4,
    "layers": 5,
    "gradients": 6,
    "model_calls": 6,
    "state_files": 1,
    "state_geometry": 6,
    "stream_order": 1,
    "slots": 2,
    "state_pool": 7,
    "doctor": 7,
    "warmup": 7,
    "compat": 7,
}
ADAPTERS = 8  # integrations, distributed, and others that use the public names
PROGRAMS = {"progress": 8, "demo": 9, "bench": 9, "cli": 10}  # and these may use testing
CORE = ("dispatch", "calls", "torch_ops")  # what adapters reach through the public operators
KERNEL_FILES = {"prefill", "transitions", "decode", "verify", "conv", "conv_qkv", "norm", "step"}
KERNEL_FILES |= {f"{name}_backward" for name in ("prefill", "conv", "norm")}

# Optional packages, and the only places that may import each.
OPTIONAL = {
    "numba": ("backends/cpu",),
    "llvmlite": ("backends/cpu",),
    "numpy": ("backends/cpu", "integrations/onnx"),
    "triton": ("backends/triton", "backends/hopper"),
    "fla": ("integrations/fla",),
    "transformers": ("integrations/transformers", "integrations/onnx", "demo", "bench"),
    "onnx": ("integrations/onnx",),
    "onnx_ir": ("integrations/onnx",),
    "onnxruntime": ("integrations/onnx",),
    "ml_dtypes": ("integrations/onnx",),
    "safetensors": ("state_files", "integrations", "demo"),
    "rich": ("progress", "bench"),
    "sglang": ("integrations/sglang",),
    "vllm": ("integrations/vllm",),
}


class Import(NamedTuple):
    """One imported module, and whether importing the file imports it at once."""

    module: str
    line: int
    eager: bool


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def _name(path: Path) -> str:
    """The dotted name of a source file."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(("sluice", *(parts[:-1] if parts[-1] == "__init__" else parts)))


MODULES = {_name(path): path for path in SOURCES}


def _imports(path: Path) -> Iterator[Import]:
    """Every import of a file, relative ones resolved, names of submodules included."""
    package = ".".join(_name(path).split(".")[: None if path.name == "__init__.py" else -1])

    def visit(node: ast.AST, eager: bool) -> Iterator[Import]:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.orelse:
                yield from visit(child, eager)
            return
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, eager)
        if isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([base] if base else [])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield Import(inner if inner in MODULES else base, node.lineno, eager)
        inside = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for child in ast.iter_child_nodes(node):
            yield from visit(child, eager and not inside)

    return visit(_tree(path), eager=True)


def _area(module: str) -> str:
    """The part of the package a module belongs to: "ops", "backends.cpu", or "" for the root."""
    parts = module.split(".")[1:]
    return ".".join(parts[:2]) if parts[:1] == ["backends"] else "".join(parts[:1])


def _rank(area: str) -> int:
    return RANKS.get(area, PROGRAMS.get(area, ADAPTERS))


def _fault(importer: str, imported: str) -> str | None:
    """Why one module of the package may not import another; None if it may."""
    here, there = _area(importer), _area(imported)
    if here == there or here == "":
        return "the root imports no backend" if here == "" and "backends" in there else None
    if there.startswith("backends"):
        if not here.startswith("backends"):
            return "only dispatch loads a backend, by its name"
        if here == "backends.cuda_driver":
            return "the CUDA driver's module knows no backend"
        if here == "backends.hopper" and there == "backends.triton":
            return None  # hopper reuses parts of triton
        if here == "backends.triton" and there == "backends.cuda_driver":
            return None  # it launches what Triton compiled
        shared = ("backends", "backends.reference")
        return None if there in shared else "a backend imports no other but the reference"
    if here.startswith("backends"):
        below = there in ("contract", "settings", "torch_private")
        return None if below else "backends take contract, settings and torch_private"
    if there == "":
        return None if _rank(here) >= ADAPTERS else "the package's own parts import parts, not it"
    if there == "testing":
        return None if here in PROGRAMS else "testing is for tests, benchmarks and commands"
    if here == "testing":
        return None if there == "contract" else "testing judges: it imports contract at most"
    if _rank(here) >= ADAPTERS and there in CORE and here not in PROGRAMS:
        return "adapters use the public operators"
    return None if _rank(there) < _rank(here) else f"{there} does not lie below {here}"


# ------------------------------------------------------------------------------ who imports whom


@pytest.mark.parametrize("path", SOURCES, ids=_name)
def test_a_module_imports_only_what_lies_below_it(path):
    faults = [
        f"{path.name}:{line}: {found}: {fault}"
        for found, line, _ in _imports(path)
        if found.split(".")[0] == "sluice" and (fault := _fault(_name(path), found))
    ]
    assert not faults


@pytest.mark.parametrize(
    ("importer", "imported"),
    [
        ("sluice", "sluice.backends.reference"),
        ("sluice.contract.checks", "sluice.backends"),
        ("sluice.contract.checks", "sluice.settings"),
        ("sluice.contract.values", "sluice.dispatch"),
        ("sluice.settings", "sluice.contract.errors"),
        ("sluice.dispatch", "sluice.backends.reference"),
        ("sluice.dispatch", "sluice.calls"),
        ("sluice.torch_private", "sluice.contract.errors"),
        ("sluice.calls", "sluice.torch_ops"),
        ("sluice.calls", "sluice.ops"),
        ("sluice.torch_ops", "sluice.ops"),
        ("sluice.contract.spec", "sluice.calls"),
        ("sluice.ops.delta", "sluice.backends.cpu"),
        ("sluice.ops.delta", "sluice.layers"),
        ("sluice.ops.delta", "sluice"),
        ("sluice.ops.delta", "sluice.testing.oracle"),
        ("sluice.layers.qwen", "sluice.backends.triton.decode"),
        ("sluice.layers.qwen", "sluice.state_pool"),
        ("sluice.layers.qwen", "sluice.model_calls"),
        ("sluice.model_calls", "sluice.warmup"),
        ("sluice.backends.cpu.decode", "sluice.ops"),
        ("sluice.backends.cpu.decode", "sluice.layers.qwen"),
        ("sluice.backends.cpu.decode", "sluice.dispatch"),
        ("sluice.backends.cpu.decode", "sluice.calls"),
        ("sluice.backends.cpu.decode", "sluice.backends.cuda_driver"),
        ("sluice.backends.cuda_driver", "sluice.backends.triton"),
        ("sluice.backends.cuda_driver", "sluice.backends.reference"),
        ("sluice.backends.cuda_driver", "sluice.dispatch"),
        ("sluice.backends.hopper.prefill", "sluice.backends.cuda_driver"),
        ("sluice.backends.cpu.decode", "sluice.integrations.transformers"),
        ("sluice.backends.cpu.decode", "sluice.backends.triton"),
        ("sluice.backends.hopper.decode", "sluice.backends.cpu.decode"),
        ("sluice.backends.triton.decode", "sluice.backends.hopper.decode"),
        ("sluice.backends.reference.decode", "sluice.backends.chunked"),
        ("sluice.gradients", "sluice.backends.chunked.prefill"),
        ("sluice.compat.fla", "sluice.backends.chunked"),
        ("sluice.compat.fla", "sluice.integrations.fla"),
        ("sluice.integrations.transformers", "sluice.backends.cpu"),
        ("sluice.integrations.transformers", "sluice.calls"),
        ("sluice.integrations.transformers", "sluice.torch_ops"),
        ("sluice.integrations.transformers", "sluice.dispatch"),
        ("sluice.integrations.transformers", "sluice.cli"),
        ("sluice.testing.oracle", "sluice.ops"),
        ("sluice.cli", "sluice.backends.cpu"),
    ],
)
def test_the_law_forbids(importer, imported):
    """The rule can fail."""
    assert _fault(importer, imported) is not None


@pytest.mark.parametrize(
    ("importer", "imported"),
    [
        ("sluice", "sluice.ops"),
        ("sluice.calls", "sluice.dispatch"),
        ("sluice.torch_ops", "sluice.calls"),
        ("sluice.ops.delta", "sluice.torch_ops"),
        ("sluice.warmup", "sluice.model_calls"),
        ("sluice.ops.delta", "sluice.contract.errors"),
        ("sluice.backends.chunked.prefill", "sluice.backends.reference.rows"),
        ("sluice.backends.cpu.decode", "sluice.contract.spec"),
        ("sluice.backends.triton.launch", "sluice.backends.cuda_driver"),
        ("sluice.backends.triton.launch", "sluice.torch_private"),
        ("sluice.backends.triton", "sluice.backends"),
        ("sluice.integrations.transformers", "sluice.layers.gated_delta_net"),
        ("sluice.integrations.vllm", "sluice.ops"),
        ("sluice.integrations.fla", "sluice.compat.fla"),
        ("sluice.bench.timing", "sluice.testing.cases"),
    ],
)
def test_the_law_allows(importer, imported):
    assert _fault(importer, imported) is None


def test_no_import_goes_round_in_a_circle():
    """Of the imports that happen when a module is imported."""
    edges = {
        name: {i.module for i in _imports(path) if i.eager and i.module in MODULES}
        - {name, "sluice"}
        for name, path in MODULES.items()
    }
    done: set[str] = set()

    def walk(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join((*trail, name))
        if name not in done:
            for other in sorted(edges[name]):
                walk(other, (*trail, name))
            done.add(name)

    for name in edges:
        walk(name, ())


def test_only_dispatch_names_the_backends_package():
    """Modules that are imported by name, without an import statement."""
    found = {
        path.name
        for path in SOURCES
        if "backends" not in path.relative_to(PACKAGE).parts
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and node.value.startswith("sluice.backends")
    }
    assert found == {"dispatch.py"}


def test_the_oracle_imports_nothing_it_judges():
    allowed = {"torch", "sluice.testing.rows", "sluice.testing", "__future__"}
    for name in ("sluice.testing.oracle", "sluice.testing.rows"):
        for found in _imports(MODULES[name]):
            base = found.module.split(".")[0]
            assert found.module in allowed or base in sys.stdlib_module_names | {"torch"}


@pytest.mark.parametrize("path", SOURCES, ids=_name)
def test_an_optional_package_stays_in_its_place(path):
    where = path.relative_to(PACKAGE).with_suffix("").as_posix()
    for module, line, eager in _imports(path):
        base = module.split(".")[0]
        if base in {"sluice", "torch"} | sys.stdlib_module_names:
            continue
        assert base in OPTIONAL, f"{path.name}:{line}: {base} is no dependency"
        assert where.startswith(OPTIONAL[base]), f"{path.name}:{line}: {base} has no place here"
        kernels = where.startswith(("backends/", "integrations/"))
        assert kernels or not eager, f"{path.name}:{line}: import {base} where it is used"


@pytest.mark.parametrize("path", TEST_FILES, ids=lambda p: p.relative_to(TESTS).as_posix())
def test_tests_import_helpers_but_not_each_other_nor_benchmarks(path):
    """``sluice.testing`` and the helper modules of tests/ are shared; a test module is not."""
    for node in ast.walk(_tree(path)):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno}: a relative import"
            names = [node.module or "", *(f"{node.module}.{a.name}" for a in node.names)]
        for name in names:
            where = f"{path.name}:{node.lineno}: {name}"
            last = name.split(".")[-1]
            inside = name.split(".")[0] == "tests"
            assert not (inside and last.startswith("test_")), f"{where} is a test module"
            assert not (inside and last == "conftest"), f"{where}: use a fixture"
            if "bench" not in path.relative_to(TESTS).as_posix():
                assert not name.startswith("sluice.bench"), f"{where} belongs to benchmarks"


def test_benchmarks_import_no_tests():
    for path in BENCH_FILES:
        for found in _imports(path) if path.is_relative_to(PACKAGE) else ():
            assert found.module.split(".")[0] not in ("tests", "pytest"), f"{path.name}: {found}"


def _backends() -> list[Path]:
    found = sorted(PACKAGE.glob("backends/*/__init__.py"))
    return [path.parent for path in found if path.read_text(encoding="utf-8").strip()]


@pytest.mark.parametrize("folder", _backends(), ids=lambda p: p.name)
def test_backends_use_the_same_file_names(folder):
    """``ls`` shows what each backend has, and each defines what dispatch needs."""
    tree = _tree(folder / "__init__.py")
    bound = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
    bound |= {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
    assert {"OPS", "DEVICES", "bind", "refuse", "unavailable"} <= bound
    (table,) = (
        n.value
        for n in tree.body
        if isinstance(n, (ast.Assign, ast.AnnAssign))
        and "OPS" in ast.unparse(n).split("=")[0].split(":")[0]
        and isinstance(n.value, ast.Dict)
    )
    files = set(ast.literal_eval(table).values())
    assert files <= KERNEL_FILES
    assert all((folder / f"{name}.py").exists() for name in files)


def test_dispatch_knows_only_backends_that_exist():
    assert set(dispatch.ORDER) <= {path.name for path in _backends()}
    assert dispatch.ORDER[-1] == "reference"


# ------------------------------------------------------------------------- the environment, files

READS_ENVIRONMENT = (
    PACKAGE / "settings.py",
    # Peers are configured by environment variables only, so a benchmark has to set them.
    PACKAGE / "bench" / "peer_environment.py",
)


def _environment_reads(tree: ast.AST) -> Iterator[int]:
    """Lines that read the environment."""
    names = ("environ", "environb", "getenv", "getenvb", "putenv")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in names:
            yield node.lineno
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            yield from (node.lineno for alias in node.names if alias.name in names)


@pytest.mark.parametrize(
    "path", [*SOURCES, *TEST_FILES], ids=lambda p: p.relative_to(ROOT).as_posix()
)
def test_only_two_files_touch_the_environment(path):
    reads = list(_environment_reads(_tree(path)))
    assert bool(reads) == (path in READS_ENVIRONMENT), f"{path.name}: lines {reads}"


@pytest.mark.parametrize(
    "code",
    ["os.environ['A']", "os.getenv('A')", "from os import environ", "import os as o; o.environ"],
)
def test_a_look_into_the_environment_is_found(code):
    assert list(_environment_reads(ast.parse(code)))


@pytest.mark.parametrize(
    "path", [*SOURCES, *TEST_FILES], ids=lambda p: p.relative_to(ROOT).as_posix()
)
def test_a_file_fits_in_one_sitting(path):
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= LONGEST, f"{path.name} has {lines} lines: split it by role"


def test_a_name_is_given_once():
    """The linter looks at functions and classes; a second list of calls would hide the first."""
    twice = []
    for path in {*SOURCES, *TEST_FILES, *BENCH_FILES}:
        names = Counter(
            name.id
            for line in _tree(path).body
            if isinstance(line, ast.Assign | ast.AnnAssign)
            for name in (line.targets if isinstance(line, ast.Assign) else [line.target])
            if isinstance(name, ast.Name)
        )
        twice += [f"{path.name}: {name}" for name, count in names.items() if count > 1]
    assert not twice


HOMES = re.compile(r"(?<![\w.~-])/(?:home|root|Users|work|mnt|data)" + "/")


def test_no_file_names_a_place_on_one_machine():
    found = []
    for pattern in ("src/**/*", "tests/**/*", "docs/**/*", "benchmarks/**/*", ".ci/*", "*"):
        for path in ROOT.glob(pattern):
            if path.suffix in (".py", ".md", ".toml", ".txt", ".json", ".csv") or path.name in (
                "Makefile",
                "run",
            ):
                text = path.read_text(encoding="utf-8", errors="replace")
                lines = enumerate(text.splitlines(), 1)
                found += [f"{path.relative_to(ROOT)}:{i}" for i, s in lines if HOMES.search(s)]
    assert not found


def test_a_place_on_one_machine_is_found():
    for name in ("home", "root"):
        assert HOMES.search(f"see '/{name}/someone/x.py'")
    assert not HOMES.search("https://example.org/home/x and src/data/x")


# ------------------------------------------------------------------------------------ import sluice

BLOCKED = """
import json, sys
allowed = set(json.loads(sys.argv[1])) | set(sys.stdlib_module_names) | {"sluice"}

class OnlyTorch:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] not in allowed:
            raise ModuleNotFoundError(f"blocked: {name}", name=name.split(".")[0])

sys.meta_path.insert(0, OnlyTorch())
import random, threading, warnings
import torch

def surroundings():
    return {
        "warnings": len(warnings.filters), "path": list(sys.path), "hooks": len(sys.path_hooks),
        "finders": len(sys.meta_path), "threads": threading.active_count(),
        "torch threads": torch.get_num_threads(), "dtype": str(torch.get_default_dtype()),
        "grad": torch.is_grad_enabled(), "seed": torch.random.get_rng_state().sum().item(),
        "random": hash(random.getstate()), "excepthook": repr(sys.excepthook),
        "precision": torch.get_float32_matmul_precision(), "cuda": torch.cuda.is_initialized(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }

before, modules = surroundings(), set(sys.modules)
import sluice
new = sorted(set(sys.modules) - modules)
changed = [k for k, v in surroundings().items() if v != before[k]]
x = torch.ones(1, 3, 1, 4)
o, state = sluice.prefill(x, x, x, normalize_qk=True)
sluice.decode(x, x, x, state=state)
sluice.rms_norm_gated(x, x, torch.ones(4))
print(json.dumps({"new": new, "changed": changed, "doctor": sluice.doctor("cpu")}))
"""


def _torch_and_what_it_needs() -> list[str]:
    """Top-level modules of torch and of the packages that torch itself installs."""
    wanted, seen = ["torch"], set()
    while wanted:
        name = re.split(r"[ ;<>=!~\[(]", wanted.pop(), maxsplit=1)[0].lower().replace("_", "-")
        if name in seen:
            continue
        seen.add(name)
        try:
            needs = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        wanted += [n for n in needs if "extra ==" not in n]
    owners = importlib.metadata.packages_distributions()
    return [
        module
        for module, names in owners.items()
        if any(name.lower().replace("_", "-") in seen for name in names) and module != "triton"
    ]


def _python(code: str, *arguments: str) -> str:
    """The output of a new interpreter that can import this package."""
    start = f"import sys; sys.path.insert(0, {str(PACKAGE.parent)!r})\n"
    command = [sys.executable, "-c", start + code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_needs_only_torch_and_changes_nothing():
    allowed = _torch_and_what_it_needs()
    assert "torch" in allowed
    assert not set(allowed) & {*OPTIONAL, "pytest", "hypothesis", "einops", "fla"}
    found = json.loads(_python(BLOCKED, json.dumps(allowed)))
    own = [name for name in found["new"] if name.split(".")[0] == "sluice"]
    others = {name.split(".")[0] for name in found["new"]} - {"sluice"}
    assert others <= sys.stdlib_module_names
    strangers = (
        "backends",
        "compat",
        "distributed",
        "integrations",
        "testing",
        "bench",
        "cli",
        "demo",
    )
    assert not [name for name in own if name.startswith(tuple(f"sluice.{x}" for x in strangers))]
    assert "sluice.ops.delta" in own
    assert found["changed"] == []
    assert "reference" in found["doctor"]


TIMED = """
import time
wall, cpu = time.perf_counter(), time.process_time()
import {}
print(time.perf_counter() - wall, time.process_time() - cpu)
"""


def test_import_takes_less_than_one_and_a_half_times_torch():
    """New processes in turn. Medians of processor time are compared, because other programs do not
    add to it. It does not include waiting, so the shortest wall times are compared as well."""
    _python("import sluice")  # writes bytecode, and reads files into the page cache
    rounds = [
        [tuple(map(float, _python(TIMED.format(name)).split())) for name in ("torch", "sluice")]
        for _ in range(3)
    ]
    torch_times, sluice_times = zip(*rounds, strict=True)
    cpu = [statistics.median(t[1] for t in times) for times in (sluice_times, torch_times)]
    wall = [min(t[0] for t in times) for times in (sluice_times, torch_times)]
    assert cpu[0] < 1.5 * cpu[1]
    assert wall[0] < 1.5 * wall[1]


def test_every_public_name_is_listed_and_there():
    assert len(set(sluice.__all__)) == len(sluice.__all__)
    assert all(hasattr(sluice, name) for name in sluice.__all__)
    bound = {
        alias.asname or alias.name
        for node in _tree(PACKAGE / "__init__.py").body
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sluice")
        for alias in node.names
    }
    assert bound <= set(sluice.__all__)


def test_parts_of_the_package_need_no_import_of_their_own():
    """What the README names as sluice.compat.fla is there after ``import sluice``, and not before
    it is asked for."""
    names = ["compat.causal_conv1d", "compat.fla", "compat.flashinfer", "distributed.prefill"]
    adapters = ("fla", "onnx", "sglang", "tokenspeed", "transformers", "vllm")
    names += [f"integrations.{adapter}" for adapter in adapters]
    asked = [f"assert sluice.{name}" for name in names]
    loaded = "assert not {'sluice.compat', 'sluice.distributed'} & sys.modules.keys()"
    _python("; ".join(["import sys, sluice", loaded, *asked]))
