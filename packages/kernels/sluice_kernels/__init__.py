"""Compiled GPU kernels of sluice: data. ``sluice`` finds them here; there is nothing to import."""

__version__ = "0.1.0"
