"""Wrong calls of every public function and command: a clear error, or a right result.

``python -m tests.wrong_calls --calls 50000 --seed 1``. A call is made right (``right.py``), then
one of its arguments is spoilt (``spoil.py``) in a way that its description suggests: the
signature's type; the shape, strides, dtype, device and values of a right one. ``judge.py`` says
what may follow, ``others.py`` has what is no operator.
"""
