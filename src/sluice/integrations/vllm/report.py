"""What a user sees: one line in the log, and counters."""

from __future__ import annotations

from collections import Counter

from sluice.integrations.vllm import private

calls: Counter[str] = Counter()
"""How often a layer of this process served each kind of batch. A replayed graph does not count."""

_said: set[str] = set()


def say_once(text: str) -> None:
    """One line in vLLM's log, once per process."""
    if text not in _said:
        _said.add(text)
        private.logger().info("sluice: %s", text)
