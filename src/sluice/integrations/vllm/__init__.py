"""vLLM's gated delta layers served by sluice: ``--additional-config '{"sluice": true}'``.

vLLM loads ``register`` in each of its processes (entry point ``vllm.general_plugins``). It puts
``layer.SluiceGDN`` into vLLM's registry of out-of-tree layers. Without the switch, every layer
stays vLLM's own. docs/vllm.md is the manual.

| file | what is in it |
|---|---|
| ``private`` | every name of vLLM that vLLM does not promise |
| ``switch`` | whether the user asked for sluice, and what stays with vLLM |
| ``layer`` | the layer vLLM builds; the shape of its calls |
| ``batch`` | vLLM's metadata of one batch, as slots, borders and drafts |
| ``serve`` | the operators' calls for a batch |
| ``drafts`` | those for speculative decoding |
| ``warm`` | compiles what ``serve`` will call |
| ``report`` | the log line, and counters |
"""

from __future__ import annotations

NAME = "sluice"
"""The key in vLLM's ``additional_config``, and the name of the plug-in."""


def register() -> None:
    """Offer sluice's layer to vLLM. Calling it again has no further effect.

    Where vLLM lacks a name that the layer needs, or another plug-in has replaced the layer, one
    line in the log says so and vLLM's own layer stays. It never raises: vLLM calls it for every
    model, and an error here would end an engine that nobody asked sluice to serve.
    """
    from sluice.integrations.vllm import private, report

    missing = private.missing()
    if missing is not None:
        report.warn_once(f"not offered: {missing}. vLLM's own layers run")
        return
    try:
        from sluice.integrations.vllm.layer import SluiceGDN

        other = private.offer(SluiceGDN)
    except Exception as broken:  # a name that `missing` does not look for
        report.warn_once(f"not offered: {type(broken).__name__}: {broken}. vLLM's own layers run")
        return
    if other is not None:
        report.warn_once(f"not offered: {other} has replaced the layer. It stays")
