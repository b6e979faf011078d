"""Files are read as data alone, no program starts unseen, and nobody is asked over a network."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "sluice"
SOURCES = sorted([*(ROOT / "src").rglob("*.py"), *(ROOT / "packages").rglob("*.py")])

CODE = ("pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "yaml")
"""Modules that run code, or make any object, when they read a file."""
NETWORK = ("socket", "ssl", "urllib", "urllib3", "http", "ftplib", "smtplib", "requests", "httpx")
NETWORK += ("aiohttp", "huggingface_hub", "telnetlib", "xmlrpc")
PROGRAMS = {
    "src/sluice/bench/worker.py",  # the same Python, to time a peer apart
    "src/sluice/bench/machine.py",  # nvidia-smi and git, for a benchmark's heading
}
"""The files that may start programs: a list of arguments, never a line for a shell."""
STARTS = ("system", "popen", "execv", "execve", "execvp", "spawnv", "startfile")


def _called(node: ast.Call) -> str:
    """What is called, as it is written."""
    return ast.unparse(node.func)


def _option(node: ast.Call, name: str) -> str:
    return next((ast.unparse(x.value) for x in node.keywords if x.arg == name), "")


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name.split(".")[0] for alias in node.names]
    if isinstance(node, ast.ImportFrom) and not node.level:
        return [(node.module or "").split(".")[0]]
    return []


def faults(code: str, may_start_programs: bool = False) -> Iterator[str]:
    """What in a source file could run foreign code or ask a network."""
    for node in ast.walk(ast.parse(code)):
        for name in _imported(node):
            if name in CODE or name in NETWORK:
                yield f"{node.lineno}: imports {name}"
            if name in ("subprocess", "pty") and not may_start_programs:
                yield f"{node.lineno}: starts programs"
        if not isinstance(node, ast.Call):
            continue
        called = _called(node)
        if called in ("eval", "exec", "__import__", "builtins.eval", "builtins.exec"):
            yield f"{node.lineno}: {called}"
        if called == "torch.load" and _option(node, "weights_only") != "True":
            yield f"{node.lineno}: {called} without weights_only=True"
        if called in ("load_state_dict_from_url", "torch.hub.load"):
            yield f"{node.lineno}: {called}"
        if called in ("np.load", "numpy.load") and _option(node, "allow_pickle") != "False":
            yield f"{node.lineno}: {called} without allow_pickle=False"
        if _option(node, "shell") not in ("", "False"):
            yield f"{node.lineno}: {called} with a shell"
        if called.startswith("os.") and called[3:] in STARTS:
            yield f"{node.lineno}: {called}"
        if _option(node, "trust_remote_code") not in ("", "False"):
            yield f"{node.lineno}: {called} trusts the code of a checkpoint"
        if called.endswith(".from_pretrained") and _option(node, "local_files_only") != "True":
            yield f"{node.lineno}: {called} without local_files_only=True"
        if called == "tempfile.mktemp":
            yield f"{node.lineno}: a name that somebody else may take"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_source_file_runs_no_foreign_code_and_asks_no_network(path):
    allowed = path.relative_to(ROOT).as_posix() in PROGRAMS
    assert list(faults(path.read_text("utf-8"), allowed)) == []


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from pickle import loads",
        "import yaml",
        "import urllib.request",
        "from http import client",
        "import socket as s",
        "def f():\n    import requests",
        "import subprocess",
        "eval(text)",
        "exec(text)",
        "__import__(name)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "torch.hub.load('x', 'y')",
        "np.load(path)",
        "np.load(path, allow_pickle=True)",
        "run(command, shell=True)",
        "os.system('ls')",
        "AutoModel.from_pretrained(name)",
        "AutoModel.from_pretrained(x, local_files_only=True, trust_remote_code=True)",
        "tempfile.mktemp()",
    ],
)
def test_the_rule_finds(code):
    """The rule can fail."""
    assert list(faults(code))


def test_what_is_harmless_is_allowed():
    code = """
import json, subprocess
torch.load(path, weights_only=True, mmap=True)
AutoModel.from_pretrained(folder, local_files_only=True)
model.eval()
subprocess.run([sys.executable, "-c", code], check=True)
"""
    assert list(faults(code, may_start_programs=True)) == []


def test_the_list_of_files_that_start_programs_is_no_longer_than_needed():
    for name in PROGRAMS:
        assert "subprocess" in (ROOT / name).read_text("utf-8"), name


# ---- no network ----------------------------------------------------------------------------------

OFFLINE = """
import socket, sys
sys.path.insert(0, sys.argv[1])
asked = []

def refuse(what):
    def asks(*args, **kwargs):
        asked.append((what, args[:2]))
        raise OSError(f"no network here: {what}")
    return asks

class NoNetwork(socket.socket):
    def __init__(self, family=socket.AF_INET, *args, **kwargs):
        if family in (socket.AF_INET, socket.AF_INET6):
            refuse("socket")(family)
        super().__init__(family, *args, **kwargs)

socket.socket = NoNetwork
for name in ("create_connection", "getaddrinfo", "gethostbyname"):
    setattr(socket, name, refuse(name))

import torch, sluice
from sluice import cli
x = torch.ones(1, 3, 1, 8)
o, state = sluice.prefill(x, x, x, normalize_qk=True)
sluice.decode(x[:, :1], x[:, :1], x[:, :1], state=state)
folder = sys.argv[2]
pool = sluice.StatePool.for_model("qwen3.5-0.8b", slots=1, tp=16)
pool.allocate()
pool.save(folder + "/state")
pool.load(folder + "/state", [0])
assert cli.main(["doctor"]) == 0
assert cli.main([]) == 0
from sluice import demo
demo.HIDDEN, demo.VOCABULARY = 64, 128
command = ["demo", "--model", "qwen3.5-0.8b", "--batch", "1", "--prompt-length", "8", "--tokens"]
assert cli.main([*command, "2", "--rounds", "1", "--dtype", "float32"]) == 0
try:
    cli.main(["demo", "--model", "nobody/no-such-model"])  # no preset, no folder: it is not fetched
except SystemExit:
    pass
print("asked:", asked)
"""


@pytest.mark.slow
def test_the_library_and_its_commands_ask_nobody(tmp_path):
    for package in ("transformers", "safetensors", "numba"):
        pytest.importorskip(package)
    command = [sys.executable, "-c", OFFLINE, str(ROOT / "src"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "asked: []"
