"""Kernels that come compiled: how they are built, found, checked and launched. No GPU is needed."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import sluice
from sluice import calls, settings
from sluice.backends import triton as portable
from sluice.backends.triton import gpu, launch, shipped, toolchain, variants
from sluice.layers.qwen import QwenShape
from tests.gpu import fake_driver
from tests.gpu.calls import by_name
from tests.gpu.cross import bound, compile_for, gpu_like, kernel_calls, sass, specs_of
from tests.gpu.without_triton import decode

pytestmark = pytest.mark.skipif(portable.interpreted(), reason="nothing is compiled there")
ROOT = Path(__file__).parents[2]
SHAPE = QwenShape("small", 64, 1, 2, 4, (0, 1, 2))
CPU = torch.device("cpu")
OPS = ("decode", "rms_norm_gated", "causal_conv1d")


@pytest.fixture(scope="module")
def builder() -> Any:
    """packages/kernels/build.py, which is no part of the library."""
    pytest.importorskip("triton")
    path = ROOT / "packages" / "kernels" / "build.py"
    spec = importlib.util.spec_from_file_location("build_kernels", path)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:  # it sets variables for the process it runs in
        for name in ("TRITON_DISABLE_LINE_INFO", "SLUICE_KERNELS"):
            patch.setenv(name, "1")
        sys.modules["build_kernels"] = module
        spec.loader.exec_module(module)
    return module


def wanted(builder: Any) -> list[variants.Variant]:
    """A few of the kernels: those of one small call per operator."""
    with gpu.assume(builder.FACTS["sm_90a"]):
        (spec,) = specs_of(lambda: sluice.decode(**decode()), CPU)
        found = [variants.variant(call) for call in bound(spec).calls]
        x = torch.randn(3, 2, 128, dtype=torch.float16)
        (spec,) = specs_of(lambda: sluice.rms_norm_gated(x, x, x[0, 0]), CPU)
        return found + [variants.variant(call) for call in bound(spec).calls]


@pytest.fixture(scope="module")
def kernels(builder: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a few kernels, compiled by the Triton that is here."""
    out = tmp_path_factory.mktemp("kernels")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLUICE_KERNELS", "")
        patch.setenv("TRITON_DISABLE_LINE_INFO", "1")
        forget()
        patch.setattr(builder, "needed", lambda target, of: wanted(builder))
        builder.build(out, ["sm_90a"], [SHAPE], jobs=1)
    forget()
    return out


def forget() -> None:
    """Nothing is remembered of the kernels that were there."""
    shipped.forget()
    variants.parameters.cache_clear()
    launch._said.cache_clear()
    calls.forget()


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Take shipped kernels from a directory."""

    def from_directory(path: Path | str) -> None:
        monkeypatch.setattr(settings, "kernels_directory", lambda: str(path))
        forget()

    yield from_directory
    monkeypatch.undo()
    forget()


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> fake_driver.Driver:
    return fake_driver.install(monkeypatch)


def changed(kernels: Path, tmp_path: Path, **told: Any) -> Path:
    """A copy of the kernels whose manifest says something else."""
    copy = tmp_path / "changed"
    (copy / "sm_90a").mkdir(parents=True)
    manifest = json.loads((kernels / shipped.MANIFEST).read_text())
    (copy / shipped.MANIFEST).write_text(json.dumps({**manifest, **told}))
    for file in (kernels / "sm_90a").iterdir():
        (copy / "sm_90a" / file.name).write_bytes(file.read_bytes())
    return copy


# ---------------------------------------------------------------------------------------- building


def test_a_manifest_says_what_each_file_is(kernels):
    manifest = json.loads((kernels / shipped.MANIFEST).read_text())
    assert manifest["sources"] == shipped.source_hash()
    assert manifest["triton"] == toolchain.version()
    entries = manifest["targets"]["sm_90a"]["kernels"].values()
    files = {file.name: file.read_bytes() for file in (kernels / "sm_90a").iterdir()}
    assert {f"{entry['sha256'][:32]}.cubin" for entry in entries} == set(files)
    for entry in entries:
        code = files[f"{entry['sha256'][:32]}.cubin"]
        assert (hashlib.sha256(code).hexdigest(), len(code)) == (entry["sha256"], entry["bytes"])
        assert code.startswith(b"\x7fELF")
        assert str(ROOT).encode() not in code


def test_two_builds_give_the_same_bytes(builder, kernels, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))  # not the first one's
    monkeypatch.setenv("TRITON_DISABLE_LINE_INFO", "1")
    monkeypatch.setattr(builder, "needed", lambda target, of: wanted(builder))
    builder.build(tmp_path / "again", ["sm_90a"], [SHAPE], jobs=1)
    first, again = (
        {file.relative_to(path): file.read_bytes() for file in path.rglob("*") if file.is_file()}
        for path in (kernels, tmp_path / "again")
    )
    assert first == again


@pytest.mark.parametrize("name", ["decode, fp32 state", "step, fp32 state", "conv"])
def test_a_shipped_kernel_rounds_as_the_one_that_a_user_s_triton_compiles(
    name, tmp_path, monkeypatch
):
    """They differ in line numbers, which shipped kernels lack. With these, ptxas takes a few other
    instructions for integers (here in "conv"), but the same for floating-point numbers."""
    with gpu_like("sm_90") as device:
        call = kernel_calls(by_name(name).run, device)[0]
    found = []
    for lineless in ("1", "0"):
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / lineless))
        monkeypatch.setenv("TRITON_DISABLE_LINE_INFO", lineless)
        found.append(compile_for(call, "sm_90"))
    assert len(found[0].asm["cubin"]) < len(found[1].asm["cubin"])
    shipped_here, users = (roundings(sass(compiled)) for compiled in found)
    assert shipped_here == users
    assert shipped_here


def roundings(code: str) -> Counter[str]:
    """How often each floating-point instruction stands in disassembled machine code."""
    names = r"(?:F|MUFU|I2F|H(?:MMA|GMMA|ADD2|MUL2|FMA2))[\w.]*"
    moves = r"(?![\w.]| R\d+, -RZ, RZ)"
    at = r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@\S+ )?"
    return Counter(re.findall(f"{at}({names}){moves}", code, re.MULTILINE))


def test_every_kernel_that_warmup_names_is_built(builder):
    """On two targets: Hopper has kernels of its own, one of them for as many key as value heads."""
    same = QwenShape("same", 64, 2, 2, 4, (0, 1, 2))
    for target, shape, mine in (
        ("sm_90a", SHAPE, {"hopper_chunks_kernel", "hopper_state_kernel"}),
        ("sm_90a", same, {"hopper_chunks_warp_kernel", "hopper_state_kernel"}),
        ("sm_80", SHAPE, {"prefill_state_kernel"}),
    ):
        names = {variant.kernel.name for variant in builder.needed(target, [shape])}
        assert mine <= names
        assert len({name for name in names if name.startswith("hopper_chunks")}) == len(mine) - 1
        assert names >= {"decode_kernel", "commit_kernel", "step_kernel", "conv_qkv_kernel"}


def test_a_variant_has_the_same_key_in_every_process(kernels):
    program = f"""
import json, pathlib, sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "src")!r}]
from tests.gpu import test_shipped as t
print(json.dumps([v.key for v in t.wanted(t.builder.__wrapped__())]))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env={"PYTHONHASHSEED": "7", "PATH": "", "SLUICE_KERNELS": ""},
        check=True,
    )
    manifest = json.loads((kernels / shipped.MANIFEST).read_text())
    assert set(json.loads(done.stdout)) == set(manifest["targets"]["sm_90a"]["kernels"])


def test_the_manifest_tells_parameters_as_triton_does(kernels, use):
    use(kernels)
    kernel = bound(specs_of(lambda: sluice.decode(**decode()), CPU)[0]).calls[0].kernel
    told = shipped.parameters(kernel.name)
    use("")
    assert told == variants.parameters(kernel)


# --------------------------------------------------------------------------------------- launching


def test_a_shipped_kernel_is_loaded_and_nothing_is_compiled(kernels, use, driver, monkeypatch):
    from sluice.backends.triton import compiler

    use(kernels)
    monkeypatch.setattr(compiler, "compile_variant", lambda *_: pytest.fail("it was compiled"))
    sluice.decode(**decode(), backend="triton")
    assert driver.loaded == ["decode_kernel"]
    assert [launched.kernel for launched in driver.launched] == ["decode_kernel"]
    assert driver.codes[0] in [file.read_bytes() for file in (kernels / "sm_90a").iterdir()]
    assert "decode: triton (shipped kernels)" in str(
        sluice.explain("decode", **decode(), backend="triton")
    )


def test_a_kernel_that_is_not_shipped_is_compiled_and_said_once(
    kernels, use, driver, caplog, monkeypatch
):
    use(kernels)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    with caplog.at_level(logging.WARNING, "sluice"):
        for norm in (False, True):
            call = {**decode(), "state_layout": "kv", "normalize_qk": norm}
            sluice.decode(**call, backend="triton")
    assert [record.getMessage()[:50] for record in caplog.records] == [
        "sluice compiles decode_kernel for a GPU now: this "
    ]
    assert len(driver.launched) == 2
    found = sluice.explain("decode", **call, backend="triton")
    assert found.origin == f"compiled by Triton {toolchain.version()}"


def test_a_damaged_file_is_never_loaded(kernels, use, driver, tmp_path):
    copy = changed(kernels, tmp_path)
    for file in (copy / "sm_90a").iterdir():
        code = bytearray(file.read_bytes())
        code[len(code) // 2] ^= 1
        file.write_bytes(bytes(code))
    use(copy)
    with pytest.raises(shipped.DamagedKernelError, match="install sluice-gdn-kernels again"):
        sluice.decode(**decode(), backend="triton")
    assert driver.loaded == []


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        ({"sources": "0" * 64}, "are of another version of sluice"),
        ({"format": 99}, "has format 99, not 1"),
        (None, "cannot be read"),
    ],
)
def test_kernels_of_other_sources_are_not_used(told, reason, kernels, use, driver, tmp_path):
    use(tmp_path if told is None else changed(kernels, tmp_path, **told))
    sluice.decode(**decode(), backend="triton")
    assert driver.codes == [b""]  # compiled by the fake
    assert reason in shipped.unused()
    assert reason in sluice.doctor("cpu")


def test_settings_of_triton_go_before_shipped_kernels(kernels, use, monkeypatch):
    monkeypatch.setenv("TRITON_ALWAYS_COMPILE", "1")
    use(kernels)
    assert shipped.installed() is None
    assert shipped.unused() == "TRITON_ALWAYS_COMPILE asks for Triton's compiler"


def test_an_edited_kernel_has_another_hash(monkeypatch):
    before, read = shipped.source_hash(), Path.read_bytes

    def edited(path: Path) -> bytes:
        return read(path) + (b"#" if path.name == "state_tile.py" else b"")

    monkeypatch.setattr(Path, "read_bytes", edited)
    shipped.source_hash.cache_clear()
    try:
        assert shipped.source_hash() != before
    finally:
        shipped.source_hash.cache_clear()


# ---------------------------------------------------------------------------------- without Triton


def test_shipped_kernels_run_where_triton_is_not_installed(kernels):
    path = f"{ROOT}:{ROOT / 'src'}"
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.without_triton"],
        capture_output=True,
        text=True,
        env={"SLUICE_KERNELS": str(kernels), "PATH": "", "PYTHONPATH": path},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    loaded, again, decode, prefill, misplaced, imported = done.stdout.splitlines()
    assert loaded == again == "['decode_kernel']"
    missing = (
        "these kernels are not among the shipped ones, and the package triton is not installed"
    )
    assert decode == prefill == f"cpu {missing}"
    assert misplaced == "needs state to begin at a multiple of 16 bytes"
    assert imported == "False"
