"""Shared by tests and benchmarks: the oracle, the comparison, inputs, and named workloads."""
