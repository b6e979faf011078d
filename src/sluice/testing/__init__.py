"""Shared by tests and benchmarks: the oracle, the comparison, inputs, cases and workloads."""
