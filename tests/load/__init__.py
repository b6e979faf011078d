"""Load: threads and streams against one pool, and 200,000 calls whose shapes keep changing.

``python -m tests.load --minutes 10``. ``pool.py`` has the threads, ``shapes.py`` the shapes; both
measure memory and latency, and compare what was computed.
"""
