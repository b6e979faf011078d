"""What a user sees: one line in the log, and counters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from sluice.integrations.vllm import private

calls: Counter[str] = Counter()
"""How often a layer of this process served each kind of batch. A replayed graph does not count."""

_said: set[str] = set()


def say_once(text: str) -> None:
    """One line in vLLM's log, once per process."""
    if text not in _said:
        _said.add(text)
        private.logger().info("sluice: %s", text)


def served_by(found: Iterable[tuple[str, str]]) -> str:
    """Operators and the backends that serve them: ``prefill hopper, triton; step triton``."""
    backends: dict[str, list[str]] = {}
    for op, backend in found:
        known = backends.setdefault(op, [])
        if backend not in known:
            known.append(backend)
    return "; ".join(f"{op} {', '.join(names)}" for op, names in backends.items())
