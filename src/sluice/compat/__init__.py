"""Other libraries' functions under their own names, argument orders and return shapes.

- ``sluice.compat.fla``: flash-linear-attention 0.6.0
- ``sluice.compat.causal_conv1d``: causal-conv1d 1.7
- ``sluice.compat.flashinfer``: FlashInfer 0.7.2

States keep upstream's layout, and are updated in place where upstream does so. Every option is
honoured, or refused by an error that names it; docs/compat.md lists them. None of the libraries is
imported. All functions run on CPU and GPU.
"""
