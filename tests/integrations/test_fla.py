"""``sluice.integrations.fla.install``: FLA's own entry points, served through its registry.

Importing FLA needs Triton, even if it is not used; without Triton only the refusal is tested.
"""

from __future__ import annotations

import importlib.util

import pytest
import torch

from sluice.compat import fla as compat
from sluice.contract.errors import SluiceError
from sluice.integrations.fla import _why_not, install, uninstall
from sluice.testing.compare import assert_same_bits

HAS_FLA = all(importlib.util.find_spec(name) for name in ("fla", "triton"))
needs_fla = pytest.mark.skipif(not HAS_FLA, reason="needs fla-core 0.6 and triton")


def inputs(per_key=False, **options):
    gen = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(*shape, generator=gen, **options)

    q, k, v = randn(1, 70, 2, 16), randn(1, 70, 2, 16), randn(1, 70, 4, 16)
    g = -randn(1, 70, 4, *([16] if per_key else [])).detach().abs()
    return q, k, v, g, randn(1, 70, 4).detach().sigmoid()


@pytest.mark.skipif(HAS_FLA, reason="FLA is there")
def test_without_fla_the_reason_is_given():
    with pytest.raises(SluiceError, match=r"install: flash-linear-attention 0\.6 is needed"):
        install()


@needs_fla
@pytest.mark.parametrize(
    ("operation", "name", "per_key"),
    [("gated_delta_rule", "chunk_gated_delta_rule", False), ("kda", "chunk_kda", True)],
)
def test_fla_s_function_is_served_on_a_cpu_until_it_is_undone(operation, name, per_key):
    import fla.backends

    if fla.backends._DISPATCH_DISABLED:
        pytest.skip("FLA's registry is off")
    function = getattr(importlib.import_module(f"fla.ops.{operation}"), name)
    call = inputs(per_key)
    install()
    install()
    try:
        options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
        found, exact = function(*call, **options), getattr(compat, name)(*call, **options)
        for a, b in zip(found, exact, strict=True):
            assert_same_bits(a, b, name)
        wanted = [x.clone().requires_grad_() for x in call]
        function(*wanted)[0].sum().backward()
        assert all(x.grad is not None for x in wanted)
    finally:
        uninstall()
    with pytest.raises(Exception, match="driver"):  # FLA's own kernels, without a GPU
        function(*call)


def test_calls_that_sluice_does_not_serve_stay_fla_s():
    def why(*args, **kwargs):
        return _why_not(compat.chunk_gated_delta_rule, args, kwargs)

    call = inputs()
    assert why(*call) is None
    assert why(*call, use_gate_in_kernel=True, A_log=torch.zeros(4)) is None
    assert "cp_context" in why(*call, cp_context=object())
    assert "new_option" in why(*call, new_option=1)
    assert "use_gate_in_kernel" in why(*call, A_log=torch.zeros(4))
    assert why(*inputs(requires_grad=True)) is None  # on a CPU
    assert why(*[x.to("meta").requires_grad_() for x in call]) is None  # and elsewhere
    kda = [x.requires_grad_() for x in inputs(True)]
    assert "use_graph" in _why_not(compat.chunk_kda, kda, {"use_graph": True, "max_num_seqs": 4})
