"""The chunk length of prefill, written once: hosts, kernels and borders between ranks share it."""

CHUNK = 64
"""Tokens per chunk. A sequence that is cut at a multiple of it keeps its chunks."""
