"""A Triton that the Hopper kernels never ran with is tried; a faulty ptxas is refused."""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("triton.experimental.gluon.nvidia.hopper")

import sluice
from sluice import calls, dispatch
from sluice.backends import cuda_driver, hopper
from sluice.backends import triton as portable
from sluice.backends.triton import compiler, toolchain, triton_private, variants
from sluice.layers import QwenShape
from sluice.model_calls import Kinds, ModelCalls
from tests.gpu import fake_driver
from tests.gpu.cross import gpu_like

pytestmark = pytest.mark.skipif(portable.interpreted(), reason="kernels have no signature there")

GONE = "async_load has been removed"
WHY = f"does not work with Triton 99.1.0: AttributeError: {GONE}"
SLOWER = f"prefill runs on the slower backend 'triton'; hopper: {WHY}"
MODEL = ModelCalls(QwenShape("", 64, 1, 2, 4, (0,)), Kinds(dtype=torch.float16))


def prefill(tokens: int = 70, backend: str | None = None) -> None:
    zeros = functools.partial(torch.zeros, dtype=torch.float16)
    q, v = zeros(1, tokens, 1, 128), zeros(1, tokens, 2, 128)
    sluice.prefill(q, q, v, beta=torch.zeros(1, tokens, 2), backend=backend)


def explained() -> dispatch.Explanation:
    zeros = functools.partial(torch.zeros, dtype=torch.float16)
    q, v = zeros(1, 70, 1, 128), zeros(1, 70, 2, 128)
    return sluice.explain("prefill", q, q, v, beta=torch.zeros(1, 70, 2))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[fake_driver.Driver]:
    """Both GPU backends, on tensors of the CPU, with a Triton from the future."""
    with gpu_like("sm_90"):
        found = fake_driver.install(monkeypatch)
        monkeypatch.setattr(dispatch, "_warned", set())
        monkeypatch.setattr(toolchain, "version", lambda: "99.1.0")
        monkeypatch.setattr(triton_private, "assembler", lambda arch: (13, 4))
        for backend in (hopper, portable):
            monkeypatch.setattr(backend, "DEVICES", ("cpu", "cuda"))
        monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
        yield found
    calls.forget()


@pytest.fixture
def broken(driver: fake_driver.Driver, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """No kernel of Hopper compiles: the kernels whose compilation was begun."""
    begun: list[str] = []

    def fails(needed: variants.Variant, target: Any) -> Any:
        begun.append(needed.kernel.name)
        if needed.kernel.name.startswith("hopper"):
            raise RuntimeError("compiling failed") from AttributeError(GONE)
        return fake_driver.compile_nothing(needed, target)

    monkeypatch.setattr(compiler, "compile_variant", fails)
    return begun


def slow_path(call: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(w.message) for w in caught if w.category is sluice.SlowPathWarning]


def kernels(driver: fake_driver.Driver) -> set[str]:
    found = {launched.kernel.split("_")[0] for launched in driver.launched}
    driver.launched.clear()
    return found


@pytest.mark.parametrize("ptxas", [(12, 9), (13, 0), (13, 2)])
def test_a_ptxas_that_makes_wrong_code_is_refused(driver, monkeypatch, ptxas):
    """What compiles may still be wrong: with 12.9, two of a thousand repeats differed."""
    monkeypatch.setattr(triton_private, "assembler", lambda arch: ptxas)
    monkeypatch.setattr(hopper, "unavailable", hopper.unable)
    (text,) = slow_path(lambda: [prefill(), prefill()])
    wrong = f"hopper: the ptxas {ptxas[0]}.{ptxas[1]} of Triton 99.1.0 makes wrong code of it: inst"
    assert wrong in text
    assert kernels(driver) == {"prefill"}


@pytest.mark.parametrize("ptxas", [(12, 8), (13, 3), (14, 0), None])
def test_any_other_ptxas_is_tried(driver, monkeypatch, ptxas):
    monkeypatch.setattr(triton_private, "assembler", lambda arch: ptxas)
    monkeypatch.setattr(hopper, "unavailable", hopper.unable)
    assert slow_path(prefill) == []
    assert kernels(driver) == {"hopper"}


def test_triton_says_which_ptxas_it_has():
    found = triton_private.assembler(90)
    assert found is not None
    assert (12, 8) <= found < (20, 0)


def test_a_release_that_works_serves_and_warns_of_nothing(driver):
    assert slow_path(prefill) == []
    assert kernels(driver) == {"hopper"}
    assert explained().chosen == "hopper"


def test_a_release_that_does_not_compile_warns_once_and_triton_serves(driver, broken):
    assert slow_path(lambda: [prefill(tokens) for tokens in (70, 70, 130)]) == [SLOWER]
    assert kernels(driver) == {"prefill"}
    assert explained().chosen == "triton"
    assert dict(explained().refusals)["hopper"] == WHY


def test_it_is_tried_once(driver, broken):
    slow_path(prefill)
    assert any(name.startswith("hopper") for name in broken)
    broken.clear()
    calls.forget()
    slow_path(lambda: prefill(130))
    assert not any(name.startswith("hopper") for name in broken)


def test_a_release_whose_code_does_not_load_warns_once(driver, monkeypatch):
    def load(code: bytes, name: str, shared: int, device: torch.device) -> int:
        if name.startswith("hopper"):
            raise sluice.BackendError("the driver does not know this code\nat all")
        return driver.load(code, name, shared, device)

    monkeypatch.setattr(cuda_driver, "load", load)
    (text,) = slow_path(lambda: [prefill(), prefill(130)])
    assert text.endswith("Triton 99.1.0: BackendError: the driver does not know this code")
    assert kernels(driver) == {"prefill"}


def test_a_release_that_lacks_a_name_the_kernels_import_warns_once(driver, monkeypatch):
    monkeypatch.setitem(sys.modules, "sluice.backends.hopper.prefill", None)
    (text,) = slow_path(lambda: [prefill(), prefill(130)])
    assert "hopper: does not work with Triton 99.1.0: ModuleNotFoundError: " in text
    assert kernels(driver) == {"prefill"}


def test_asked_for_by_name_it_raises_and_names_the_reason(driver, broken):
    for _ in range(2):
        with pytest.raises(sluice.BackendError, match="hopper: does not work with Triton 99"):
            prefill(backend="hopper")
    assert driver.launched == []


def test_what_was_bound_before_is_bound_anew(driver, monkeypatch):
    """One kernel compiles and the next does not: `explain` speaks for both calls."""
    prefill()
    assert kernels(driver) == {"hopper"}

    def fails(needed: variants.Variant, target: Any) -> Any:
        if needed.kernel.name.startswith("hopper"):
            raise AttributeError(GONE)
        return fake_driver.compile_nothing(needed, target)

    monkeypatch.setattr(compiler, "compile_variant", fails)
    monkeypatch.setattr(compiler, "_compiled", {})
    monkeypatch.setattr(importlib.import_module("sluice.backends.triton.launch"), "_codes", {})
    assert slow_path(lambda: prefill(130)) == [SLOWER]
    assert kernels(driver) == {"prefill"}
    assert slow_path(prefill) == []
    assert kernels(driver) == {"prefill"}


@pytest.mark.parametrize("version", ["3.6.0", "3.6.7", "3.9.0"])
def test_with_a_tested_release_an_error_is_an_error(driver, broken, monkeypatch, version):
    monkeypatch.setattr(toolchain, "version", lambda: version)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="compiling failed"):
            prefill()
    assert hopper.unavailable() is None
    assert driver.launched == []


def test_an_interrupt_is_no_verdict(driver, monkeypatch):
    def interrupted(needed: variants.Variant, target: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(compiler, "compile_variant", interrupted)
        with pytest.raises(KeyboardInterrupt):
            prefill()
    assert slow_path(prefill) == []
    assert kernels(driver) == {"hopper"}


def test_an_older_release_is_refused_at_once(monkeypatch):
    monkeypatch.setattr(toolchain, "version", lambda: "3.5.1")
    assert hopper.unable() == "needs Triton 3.6 or newer, found 3.5.1"


def test_warming_up_compiles_triton_s_kernels_instead_and_warns_once(driver, broken):
    spec = MODEL.call("prefill", "", 2, 2048, True).spec(torch.device("cuda", 0))
    (text,) = slow_path(lambda: [dispatch.compile([spec]), dispatch.compile([spec])])
    assert text == SLOWER
    assert {"prefill_inverse_kernel", "prefill_state_kernel"} < set(broken)
    assert slow_path(prefill) == []
    assert kernels(driver) == {"prefill"}


def test_doctor_says_what_happens(driver, broken):
    report = sluice.doctor("cuda")
    assert f"  hopper     unavailable: {WHY}\n" in report
    assert "    prefill          triton     compiled by Triton 99.1.0\n" in report


def test_doctor_says_what_was_never_run(driver):
    only = ", ".join(hopper.TESTED)
    report = sluice.doctor("cuda")
    never = f"never ran with Triton 99.1.0, only with {only}\n"
    assert f"  hopper     prefill; gradients of prefill; {never}" in report
    assert "    prefill          hopper     compiled by Triton 99.1.0\n" in report
    assert any(name.startswith("hopper") for name in driver.loaded), "it was tried"


def test_the_reason_is_one_line_without_the_kernel_s_source():
    from triton.compiler.errors import CompilationError

    error = CompilationError("def kernel():\n    tma.gone()\n", None, "tma.gone is gone\nread on")
    assert hopper._reason(error) == "CompilationError: tma.gone is gone"
    assert hopper._reason(ValueError()) == "ValueError"
