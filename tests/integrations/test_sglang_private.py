"""How the SGLang plug-in is offered, with stand-ins for SGLang's modules."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from sluice.integrations.sglang import private

FLAGS = ("linear_attn_backend", "linear_attn_decode_backend", "linear_attn_prefill_backend")


class SGLang:
    """Its steps of resolution: the last declaration of a field counts, the input stays."""

    def __init__(self, monkeypatch, steps: tuple[str, ...]) -> None:
        self.steps, self.hooks, self.choices, self.wrapped = steps, {}, [], []
        modules: dict[str, dict[str, Any]] = {
            "srt.plugins.hook_registry": {
                "HookRegistry": SimpleNamespace(register=lambda *args: self.wrapped.append(args)),
                "HookType": SimpleNamespace(AROUND="around"),
            },
            "srt.server_args": {"add_linear_attn_kernel_backend_choices": self.choices.extend},
            "srt.arg_groups.resolution_hooks": {"register_resolution_hook": self.register},
            "srt.arg_groups.overrides": {"declare_resolution": self.declare},
            "srt.arg_groups.model_override_base": {"resolving_view": self.view},
        }
        for name, names in modules.items():
            module = ModuleType(f"sglang.{name}")
            vars(module).update(names)
            parts = module.__name__.split(".")
            for n in range(1, len(parts)):
                package = ".".join(parts[:n])
                monkeypatch.setitem(sys.modules, package, ModuleType(package))
            monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(private, "_offered", [])

    def register(self, name):
        if name not in self.steps:
            raise ValueError(f"{name!r} is not an overridable resolution hook")
        return lambda hook: self.hooks.setdefault(name, hook)

    def declare(self, server_args, source, **fields):
        server_args.declared.append((source, fields))

    def view(self, server_args):
        seen = dict(vars(server_args.given))
        for _, fields in server_args.declared:
            seen |= fields
        return SimpleNamespace(**seen)

    def check(self, **given) -> tuple[list, Any]:
        """What the step that checks the layout sees of the flags, and what they are afterwards."""
        flags = {**dict.fromkeys(FLAGS), "linear_attn_backend": "triton", **given}
        server_args = SimpleNamespace(given=SimpleNamespace(**flags), declared=[])
        seen = []

        def step(args):
            seen.append([getattr(self.view(args), flag) for flag in FLAGS])

        self.hooks["handle_page_major_kv_layout"](server_args, step)
        return seen, [getattr(self.view(server_args), flag) for flag in FLAGS]


def test_sglang_checks_strided_pools_as_if_for_its_own_kernels(monkeypatch):
    sglang = SGLang(monkeypatch, steps=("handle_page_major_kv_layout",))
    private.offer("sluice", print)
    assert sglang.choices == ["sluice"]
    both = dict.fromkeys(FLAGS[1:], "sluice")
    assert sglang.check(**both) == ([["triton"] * 3], ["triton", "sluice", "sluice"])
    one = {FLAGS[2]: "sluice", FLAGS[1]: "cutedsl"}
    assert sglang.check(**one) == (
        [["triton", "cutedsl", "triton"]],
        ["triton", "cutedsl", "sluice"],
    )
    assert sglang.check(linear_attn_backend="sluice")[1] == ["sluice", None, None]
    others = ["flashinfer", "triton", None]
    given = dict(zip(FLAGS, others, strict=True))
    assert sglang.check(**given) == ([others], others)


def test_flags_are_the_users_again_after_sglang_has_refused_something_else(monkeypatch):
    sglang = SGLang(monkeypatch, steps=("handle_page_major_kv_layout",))
    private.offer("sluice", print)
    given = SimpleNamespace(**dict.fromkeys(FLAGS, "sluice"))
    server_args = SimpleNamespace(given=given, declared=[])

    def step(args):
        raise AssertionError("another flag")

    with pytest.raises(AssertionError, match="another flag"):
        sglang.hooks["handle_page_major_kv_layout"](server_args, step)
    assert sglang.view(server_args) == given


@pytest.mark.parametrize("without", ["the step", "hooks"])
def test_a_release_without_the_hook_is_offered_sluice_all_the_same(monkeypatch, without):
    sglang = SGLang(monkeypatch, steps=())
    if without == "hooks":
        monkeypatch.setitem(sys.modules, "sglang.srt.arg_groups.resolution_hooks", None)
    private.offer("sluice", print)
    assert sglang.choices == ["sluice"]
    assert len(sglang.wrapped) == 1
    assert not sglang.hooks
