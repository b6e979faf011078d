"""``sluice bench``: every operator and its peers, checked before they are timed.

How a number is made: ``plan`` names the workloads, ``session`` lets one provider run one of them,
``check`` compares its output with the oracle, ``timing_cpu`` and ``timing_gpu`` time what passed,
``floors`` measures the limits of the machine, ``run`` does all this in order, and ``results`` holds
the outcome. ``table``, ``html``, ``compare`` and ``docs`` only read results.
"""
