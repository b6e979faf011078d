"""Which backend serves a call, why the others do not, and that a slower choice warns."""

from __future__ import annotations

import functools
import runpy
import threading
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import sluice
from sluice import calls, dispatch, settings
from sluice.doctor import specs
from sluice.layers.qwen import PRESETS
from sluice.testing.case import Case

OPERATORS = tuple(calls.OPERATORS)


def _norm(**options: Any) -> torch.Tensor:
    x = torch.ones(2, 4)
    return sluice.rms_norm_gated(x, x, torch.ones(4), **options)


def _fake(
    mark: float = 0.0,
    ops: tuple[str, ...] = OPERATORS,
    devices: tuple[str, ...] = ("cpu",),
    reason: str | None = None,
    missing: str | None = None,
) -> SimpleNamespace:
    """A backend that writes the same number everywhere, or refuses."""
    return SimpleNamespace(
        OPS=dict.fromkeys(ops, "module"),
        DEVICES=devices,
        refuse=lambda spec: reason,
        unavailable=lambda: missing,
        bind=lambda spec: lambda tensors: tensors[spec.TENSORS.index("out")].fill_(mark),
    )


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Put backends (fakes, or exceptions that their import raises) before the reference."""
    real = dispatch._module

    def forget() -> None:
        calls.forget()
        dispatch._warned.clear()

    def put(**backends: Any) -> None:
        def module(name: str) -> Any:
            found = backends.get(name) or real(name)
            if isinstance(found, Exception):
                raise found
            return found

        monkeypatch.setattr(dispatch, "ORDER", (*backends, "reference"))
        monkeypatch.setattr(dispatch, "_module", module)
        forget()

    forget()
    yield put
    forget()


# --------------------------------------------------------------------------------------- choosing


def test_the_first_that_takes_the_call_serves_it(install):
    install(fast=_fake(1.0), slow=_fake(2.0))
    assert _norm()[0, 0] == 1.0
    assert sluice.explain("rms_norm_gated", *[torch.ones(4)] * 3).chosen == "fast"


def test_backend_names_the_one_that_serves(install):
    install(fast=_fake(1.0), slow=_fake(2.0))
    assert _norm(backend="slow")[0, 0] == 2.0


def test_use_backend_holds_in_its_scope_and_nests(install):
    install(fast=_fake(1.0), slow=_fake(2.0))
    assert _norm()[0, 0] == 1.0
    with sluice.use_backend("slow"):
        assert _norm()[0, 0] == 2.0
        with sluice.use_backend("fast"):
            assert _norm()[0, 0] == 1.0
        with sluice.use_backend(None):
            assert _norm()[0, 0] == 1.0
        assert _norm(backend="fast")[0, 0] == 1.0
        assert _norm()[0, 0] == 2.0
    assert _norm()[0, 0] == 1.0


def test_use_backend_ends_with_an_exception(install):
    install(fast=_fake(1.0), slow=_fake(2.0))
    with pytest.raises(KeyError), sluice.use_backend("slow"):
        raise KeyError
    assert _norm()[0, 0] == 1.0


def test_use_backend_is_not_seen_by_another_thread(install):
    install(fast=_fake(1.0), slow=_fake(2.0))
    found = []
    with sluice.use_backend("slow"):
        thread = threading.Thread(target=lambda: found.append(float(_norm()[0, 0])))
        thread.start()
        thread.join()
    assert found == [1.0]


@pytest.mark.parametrize("name", ["nvidia", "", "Reference", 3])
def test_an_unknown_backend_is_an_error(install, name):
    install(fast=_fake(1.0))
    expected = rf"backend: expected one of \['fast', 'reference'\], got {name!r}"
    with pytest.raises(sluice.BackendError, match=expected):
        _norm(backend=name)
    with pytest.raises(sluice.BackendError, match=expected), sluice.use_backend(name):
        pass
    with pytest.raises(sluice.BackendError, match=expected):
        sluice.explain("rms_norm_gated", *[torch.ones(4)] * 3, backend=name)


def test_a_backend_asked_for_fails_with_its_reason_and_runs_nothing(install):
    install(fast=_fake(1.0, reason="V must be 128, got 4"))
    out = torch.full((2, 4), 5.0)
    with pytest.raises(sluice.BackendError, match="fast: V must be 128, got 4"):
        _norm(backend="fast", out=out)
    with sluice.use_backend("fast"), pytest.raises(sluice.BackendError, match="V must be 128"):
        _norm(out=out)
    assert torch.equal(out, torch.full((2, 4), 5.0))


def test_no_backend_at_all_lists_every_reason(install, monkeypatch):
    install(fast=_fake(reason="too small"), gpu=_fake(devices=("cuda",)), part=_fake(ops=("step",)))
    monkeypatch.setattr(dispatch, "ORDER", ("fast", "gpu", "part"))
    with pytest.raises(sluice.BackendError) as caught:
        _norm()
    assert str(caught.value).splitlines() == [
        "rms_norm_gated: no backend serves this call",
        "  fast: too small",
        "  gpu: runs on cuda, not on cpu",
        "  part: has no rms_norm_gated",
    ]


def test_a_backend_receives_a_frozen_spec_without_tensors(install):
    seen: list[Any] = []
    fake = _fake()
    fake.refuse = lambda spec: seen.append(spec)
    install(fast=fake)
    _norm()
    (spec,) = set(seen)
    assert spec.op == "rms_norm_gated"
    assert not any(isinstance(x, torch.Tensor) for x in vars(spec).values())
    for name in ("V", "eps", "x"):
        with pytest.raises(AttributeError):
            setattr(spec, name, getattr(spec, name))


# --------------------------------------------------------------------------------------- warnings


def _warned(call: Callable[[], Any]) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [w for w in caught if w.category is sluice.SlowPathWarning]


def test_a_slower_choice_warns_once_and_says_why(install):
    install(fast=_fake(reason="V must be 128, got 4"), slow=_fake(2.0))
    (warning,) = _warned(lambda: [_norm() for _ in range(3)])
    expected = "rms_norm_gated runs on the slower backend 'slow'; fast: V must be 128, got 4"
    assert str(warning.message) == expected
    assert warning.filename == __file__


def test_a_missing_package_is_named_with_the_extra_that_installs_it(install, monkeypatch):
    install(fast=_fake(missing="the package numba is not installed"), slow=_fake(2.0))
    monkeypatch.setitem(dispatch.EXTRAS, "fast", "cpu")
    (warning,) = _warned(_norm)
    assert "the package numba is not installed: pip install 'sluice-gdn[cpu]'" in str(
        warning.message
    )


def test_a_warning_points_past_the_libraries_to_the_users_line(install):
    """A model of transformers calls operators from inside transformers and torch."""
    install(fast=_fake(reason="V must be 128, got 4"), slow=_fake(2.0))
    x = torch.ones(2, 4)
    call = functools.partial(sluice.rms_norm_gated, x, x, torch.ones(4))
    inside: dict = {"__name__": "transformers.models.some.modeling_some", "call": call}
    exec(compile("def forward(module): return call()", "modeling_some.py", "exec"), inside)

    class Layer(torch.nn.Module):
        forward = inside["forward"]

    (warning,) = _warned(lambda: Layer()())
    assert warning.filename == __file__


def test_another_reason_warns_again(install):
    fake = _fake()
    fake.refuse = lambda spec: f"V must be 128, got {spec.V}"
    install(fast=fake, slow=_fake(2.0))

    def wide() -> torch.Tensor:
        return sluice.rms_norm_gated(torch.ones(2, 8), torch.ones(2, 8), torch.ones(8))

    assert len(_warned(_norm)) == 1
    assert len(_warned(wide)) == 1
    assert _warned(_norm) == []
    assert _warned(wide) == []


def test_a_missing_package_warns_too(install):
    install(fast=_fake(missing="the package numba is not installed"), slow=_fake(2.0))
    (warning,) = _warned(_norm)
    assert "fast: the package numba is not installed" in str(warning.message)


@pytest.mark.parametrize(
    "fast", [_fake(devices=("cuda",)), _fake(ops=("step",))], ids=["other device", "other operator"]
)
def test_what_a_backend_is_not_for_is_no_warning(install, fast):
    install(fast=fast, slow=_fake(2.0))
    assert _warned(_norm) == []


def test_the_backend_asked_for_is_no_warning(install):
    install(fast=_fake(reason="no"), slow=_fake(2.0))
    assert _warned(lambda: _norm(backend="slow")) == []


@pytest.mark.parametrize("error", [ImportError("no module named x"), OSError("libx.so: missing")])
def test_a_backend_that_cannot_be_imported_is_a_reason(install, error):
    install(broken=error, slow=_fake(2.0))
    (warning,) = _warned(lambda: [_norm(), _norm()])
    assert f"broken: cannot be imported: {error}" in str(warning.message)
    explanation = sluice.explain("rms_norm_gated", *[torch.ones(4)] * 3)
    assert explanation.refusals[0] == ("broken", f"cannot be imported: {error}")
    with pytest.raises(sluice.BackendError, match="cannot be imported"):
        _norm(backend="broken")
    assert f"broken     unavailable: cannot be imported: {error}" in sluice.doctor("cpu")


# ---------------------------------------------------------------------------- explain and doctor


def _meta_call(op: str) -> tuple[list[Any], dict[str, Any]]:
    """Arguments of a small call, without memory."""
    case = Case(op, "verify" if op == "commit" else op, batch=2, tokens=2, raw=True)
    inputs = case.inputs(device="meta")
    accepted = inputs.pop("num_accepted", None)
    if op == "commit":
        return [sluice.verify(**inputs)[1], accepted], {}
    return [], inputs


@pytest.mark.parametrize("op", OPERATORS)
def test_explain_takes_meta_tensors_and_runs_nothing(install, op):
    fake = _fake(reason="too small")

    def bind(spec: Any) -> Any:
        raise AssertionError(f"{spec.op} was bound")

    fake.bind = bind
    install(fast=fake, slow=SimpleNamespace(**{**vars(_fake(2.0)), "bind": bind}))
    args, kwargs = _meta_call(op)
    explanation = sluice.explain(op, *args, **kwargs, device="cpu")
    assert (explanation.op, explanation.chosen) == (op, "slow")
    assert explanation.refusals[0] == ("fast", "too small")
    assert str(explanation).splitlines() == [
        f"{op}: slow",
        "  fast: too small",
        "  reference: serves this too; slow comes first",
    ]


def test_explain_writes_no_state():
    x, state = torch.ones(1, 1, 1, 4), torch.zeros(1, 1, 4, 4)
    assert sluice.explain("decode", x, x, x, state=state).chosen is not None
    assert torch.equal(state, torch.zeros(1, 1, 4, 4))


def test_explain_warns_of_nothing(install):
    install(fast=_fake(reason="no"), slow=_fake(2.0))
    assert _warned(lambda: sluice.explain("rms_norm_gated", *[torch.ones(4)] * 3)) == []


def test_explain_follows_the_choice(install):
    install(fast=_fake(1.0), slow=_fake(2.0))
    ones = [torch.ones(4)] * 3
    asked = sluice.explain("rms_norm_gated", *ones, backend="slow")
    assert asked.chosen == "slow"
    assert asked.refusals[0] == ("fast", "not asked for (backend='slow')")
    with sluice.use_backend("slow"):
        assert sluice.explain("rms_norm_gated", *ones) == asked


def test_explain_tells_of_other_devices(install):
    install(gpu=_fake(devices=("cuda",)))
    ones = [torch.ones(4)] * 3
    assert sluice.explain("rms_norm_gated", *ones).chosen == "reference"
    assert sluice.explain("rms_norm_gated", *ones, device="cuda").chosen == "gpu"


def test_explain_raises_what_the_call_would():
    with pytest.raises(sluice.ContractError, match="weight: expected shape"):
        sluice.explain("rms_norm_gated", torch.ones(4), torch.ones(4), torch.ones(3))
    with pytest.raises(ValueError, match="op: expected one of"):
        sluice.explain("attention", torch.ones(4))


def test_doctor_lists_every_model_operator_and_backend():
    report = sluice.doctor("cpu")
    lines = report.splitlines()
    for name in {shape.name for shape in PRESETS.values()}:
        assert any(name in line for line in lines), f"no line names {name}"
    for op in OPERATORS:
        assert any(line.split()[:1] == [op] and len(line.split()) == 2 for line in lines)
    for backend in dispatch.ORDER:
        assert any(line.split()[:1] == [backend] for line in lines)
    assert f"torch {torch.__version__}" in report
    assert "transitions" not in report, "that is no operator for users"


@pytest.mark.parametrize("shape", dict.fromkeys(PRESETS.values()), ids=lambda s: s.name)
def test_every_preset_is_served_on_a_cpu(shape):
    found = list(specs(shape, torch.device("cpu")))
    assert sorted(spec.op for spec in found) == sorted(OPERATORS)
    for spec in found:
        assert dispatch.explain(spec).chosen is not None


def test_doctor_says_who_serves_each_operator(install):
    install(fast=_fake(ops=("decode",)), none=_fake(missing="no CUDA device"))
    report = sluice.doctor("cpu")
    assert "fast       decode" in report
    assert "none       unavailable: no CUDA device" in report
    assert "    decode           fast" in report
    assert "    prefill          reference" in report


# --------------------------------------------------------------------------------------- validate


@pytest.fixture
def on_a_gpu(install: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that seem to be on a GPU, where values are not checked by default; nothing runs."""
    describe = calls._describe

    def elsewhere(*args: Any) -> Any:
        spec, outputs = describe(*args)
        return spec.on(torch.device("cuda", 0)), outputs

    monkeypatch.setattr(calls, "_describe", elsewhere)
    install(gpu=_fake(devices=("cuda",)))


def _bad_slot() -> None:
    x = torch.ones(1, 1, 1, 4)
    sluice.decode(x, x, x, state=torch.zeros(2, 1, 4, 4), slots=torch.tensor([9]))


def test_values_are_always_checked_on_a_cpu():
    with sluice.validate(False), pytest.raises(sluice.ContractError, match=r"slots\[0\]"):
        _bad_slot()


@pytest.mark.usefixtures("on_a_gpu")
def test_values_on_a_gpu_are_checked_inside_validate_only():
    _bad_slot()
    with sluice.validate():
        with pytest.raises(sluice.ContractError, match=r"slots\[0\]: expected a slot below 2"):
            _bad_slot()
        with sluice.validate(False):
            _bad_slot()
        assert settings.validating()
    assert not settings.validating()
    _bad_slot()


def test_validate_ends_with_an_exception():
    with pytest.raises(KeyError), sluice.validate():
        raise KeyError
    assert not settings.validating()


@pytest.mark.parametrize(("value", "on"), [(None, False), ("", False), ("0", False), ("1", True)])
def test_validate_is_set_by_the_environment(monkeypatch, value, on):
    if value is None:
        monkeypatch.delenv("SLUICE_VALIDATE", raising=False)
    else:
        monkeypatch.setenv("SLUICE_VALIDATE", value)
    fresh = runpy.run_path(settings.__file__)
    assert fresh["validating"]() is on
