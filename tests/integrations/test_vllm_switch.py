"""When the vLLM plug-in serves, and what it says: no vLLM is needed."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from sluice.integrations import engine_calls
from sluice.integrations import vllm as plugin
from sluice.integrations.vllm import private, report, switch


class Log:
    """Lines as (level, text)."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []

    def __getattr__(self, level: str):
        return lambda text, *args: self.lines.append((level, text % args))


@pytest.fixture
def log(monkeypatch) -> Log:
    made = Log()
    monkeypatch.setattr(private, "logger", lambda: made)
    monkeypatch.setattr(report, "_said", set())
    return made


def test_a_line_is_said_once_and_what_is_not_served_is_a_warning(log):
    for _ in range(3):
        report.say_once("serves")
        report.warn_once("vLLM's own layers run")
    assert log.lines == [
        ("info", "sluice: serves"),
        ("warning", "sluice: vLLM's own layers run"),
    ]


def test_a_release_without_a_name_gives_one_line_and_no_error(log, monkeypatch):
    """vLLM calls ``register`` for every model; an error would end an engine nobody asked us for."""
    monkeypatch.setattr(private, "missing", lambda: "this vLLM has no such layer")
    plugin.register()
    monkeypatch.setattr(private, "missing", lambda: None)
    monkeypatch.setitem(sys.modules, "sluice.integrations.vllm.layer", None)
    plugin.register()
    (level, first), (again, second) = log.lines
    assert (level, again) == ("warning", "warning")
    assert "not offered: this vLLM has no such layer. vLLM's own layers run" in first
    assert "not offered: ModuleNotFoundError" in second


@pytest.mark.parametrize(
    ("backends", "slow"), [(("hopper", "triton"), False), (("cpu", "reference"), True)]
)
def test_plain_torch_is_called_slow(backends, slow):
    assert engine_calls.slowly(("prefill", backend) for backend in backends) == slow


def _config(**more) -> SimpleNamespace:
    cache = SimpleNamespace(mamba_cache_mode=more.pop("mode", "align"))
    given = {"sluice": more.pop("value", True)}
    return SimpleNamespace(
        cache_config=cache,
        speculative_config=None,
        lora_config=None,
        additional_config=given,
        **more,
    )


_QWEN = SimpleNamespace(hidden_act="silu", linear_key_head_dim=128, linear_value_head_dim=128)


@pytest.mark.parametrize(
    ("platform", "config", "layer", "reason"),
    [
        ("cuda", _config(), _QWEN, None),
        ("cpu", _config(mode="none"), _QWEN, None),
        ("cpu", _config(value="yes"), _QWEN, "is 'yes'; true switches it on"),
        ("cpu", _config(value={"drafts": 3}), _QWEN, "true switches it on"),
        ("rocm", _config(), _QWEN, "rocm"),
        ("cuda", _config(mode="all"), _QWEN, "all"),
        ("cuda", SimpleNamespace(**{**vars(_config()), "lora_config": 1}), _QWEN, "LoRA"),
        ("cuda", _config(), SimpleNamespace(**{**vars(_QWEN), "hidden_act": "gelu"}), "gelu"),
        *(
            (
                "cuda",
                _config(),
                SimpleNamespace(**{**vars(_QWEN), f"linear_{x}_head_dim": 512}),
                "wider",
            )
            for x in ("key", "value")
        ),
    ],
)
def test_what_stays_with_vllm(monkeypatch, platform, config, layer, reason):
    monkeypatch.setattr(switch.private, "platform", lambda: platform)
    found = switch.why_not(config, layer)
    assert found is None if reason is None else reason in found


@pytest.mark.parametrize(
    ("drafts", "tree", "served"),
    [
        (3, None, True),
        (7, None, True),
        (8, None, False),  # with the certain token before them more than `decode` takes
        (2, "[(0,), (0, 0)]", True),
        (2, "[(0,), (1,)]", False),
    ],
)
def test_drafts_that_are_served(monkeypatch, drafts, tree, served):
    monkeypatch.setattr(switch.private, "platform", lambda: "cuda")
    config = _config()
    config.speculative_config = SimpleNamespace(
        num_speculative_tokens=drafts, speculative_token_tree=tree
    )
    assert (switch.why_not(config, _QWEN) is None) == served


@pytest.mark.parametrize(
    ("given", "on"),
    [
        ({}, False),
        ({"sluice": True}, True),
        ({"sluice": True, "of another plug-in": 3}, True),
        ({"sluice": "yes"}, True),  # then one line says why not
        ({"sluice": False}, False),
        ({"sluice": None}, False),
        (None, False),
    ],
)
def test_sluice_serves_only_where_it_was_asked(given, on):
    assert switch.asked(SimpleNamespace(additional_config=given)) == on
