"""Run compiled kernels without a GPU: an emulator of PTX (docs/kernels/emulator.md)."""
