"""The chunk length of prefill on a GPU, for the hosts and the kernels of both GPU backends."""

CHUNK = 64
"""Tokens per chunk."""
