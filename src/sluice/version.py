"""The version: written here, read by ``sluice.__version__``, ``sluice doctor`` and the build."""

__version__ = "0.1.0"
