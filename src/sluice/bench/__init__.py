"""``sluice bench``: every operator beside every peer, checked before it is timed.

The way of a number: ``plan`` names the workloads, ``session`` has one provider run one of them,
``check`` holds its output against the oracle, ``timing_cpu`` and ``timing_gpu`` time what passed,
``floors`` measures what the machine could do, ``run`` goes through all of it, and ``results`` keeps
what came of it. ``table``, ``html``, ``compare`` and ``docs`` only read results.
"""
