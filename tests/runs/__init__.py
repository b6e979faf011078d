"""Random long runs: a random engine drives StatePool and the operators, next to an oracle.

``python -m tests.runs --steps 20000 --seed 1``. A run consists of episodes of 1,000 steps; each has
a seed, a pool and a model of its own (``plan.py``). A step is one action of an engine (``draw.py``
chooses it; ``acts.py``, ``advance.py`` and ``drafts.py`` perform it): admit, prefill a chunk,
decode, verify, commit, fork, snapshot, restore, free, and mistakes that must be refused.
``exact.py`` keeps every sequence by itself, in float64, without slots; ``world.py`` compares after
every step. ``episode.py`` makes a failure small.
"""
