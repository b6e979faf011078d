"""SGLang's gated delta layers served by sluice.

``--linear-attn-decode-backend sluice --linear-attn-prefill-backend sluice`` switches it on; either
flag alone is possible, and draft tokens follow the first. SGLang loads ``register`` in each of its
processes (entry point ``sglang.srt.plugins``). docs/sglang.md is the manual.

| file | what is in it |
|---|---|
| ``private`` | every name of SGLang that SGLang does not promise |
| ``backend`` | the attention backend, a subclass of SGLang's |
| ``serve`` | the operators' calls, and those compiled beforehand |
| ``drafts`` | the same for draft tokens: ``verify``, and the commit |
"""

from __future__ import annotations

NAME = "sluice"
"""The name of the backend on SGLang's command line."""


def register() -> None:
    """Offer the backend to SGLang. Calling it again has no further effect.

    Where SGLang lacks a name that the backend needs, one line in the log says so, and the command
    line does not know ``sluice``.
    """
    from sluice.integrations.sglang import private

    missing = private.missing()
    if missing is not None:
        private.warn_once(f"not offered: {missing}")
        return
    private.offer(NAME, _around)


def _around(original, runner, full_attn_backend):
    """SGLang builds its attention backends: with sluice's in place of its own, if asked for."""
    from sluice.integrations.sglang import private

    asked = private.asked(NAME)
    if not any(asked):
        return original(runner, full_attn_backend)
    from sluice.integrations.sglang.backend import SluiceGDNAttnBackend

    with private.in_place_of_own(SluiceGDNAttnBackend):
        return original(runner, full_attn_backend)
