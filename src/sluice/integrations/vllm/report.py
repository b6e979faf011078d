"""What a user sees: one line in the log, and counters."""

from __future__ import annotations

from collections import Counter

from sluice.integrations.vllm import private

calls: Counter[str] = Counter()
"""How often a layer of this process served each kind of batch. A replayed graph does not count."""

_said: set[str] = set()


def say_once(text: str, level: str = "info") -> None:
    """One line in vLLM's log, once per process."""
    if text not in _said:
        _said.add(text)
        getattr(private.logger(), level)("sluice: %s", text)


def warn_once(text: str) -> None:
    """The same as a warning: something that sluice was asked for stays with vLLM, or is slow."""
    say_once(text, "warning")
