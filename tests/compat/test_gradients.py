"""Gradients of FLA's functions and of the convolutions, in float64.

The reference is autograd through the recurrence, token by token. ``gradcheck`` (finite differences)
checks this reference, and the convolutions.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from sluice.compat import causal_conv1d as cc
from sluice.compat import fla
from sluice.compat.flashinfer import chunk_gated_delta_rule as flashinfer_prefill
from sluice.contract.errors import SluiceError
from sluice.testing.compare import assert_within

pytestmark = pytest.mark.filterwarnings("ignore::sluice.SlowPathWarning")
CLOSE = 1e-10


def drawn(*shape, seed=0):
    gen = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=gen, dtype=torch.float64)


def token_by_token(q, k, v, g, beta, S, *, normalize, scale, borders=None):
    """The recurrence over [B, T, H, D], S [N, HV, K, V]; autograd follows every token."""
    r = v.shape[2] // q.shape[2]
    if normalize:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(r, dim=2) for x in (q * scale, k))
    spans = [(slice(None), 0, v.shape[1])]
    if borders is not None:
        pairs = enumerate(itertools.pairwise(borders))
        spans = [(slice(i, i + 1), a, b) for i, (a, b) in pairs]
    os, finals = [], []
    for rows, a, b in spans:
        one = S[rows]
        for t in range(a, b):
            decay = g[:, t].exp()
            decay = decay[..., None, None] if decay.dim() == 2 else decay[..., None]
            one = decay * one
            d = beta[:, t, :, None] * (v[:, t] - torch.einsum("nhkv,nhk->nhv", one, k[:, t]))
            one = one + k[:, t, :, :, None] * d[:, :, None]
            os.append(torch.einsum("nhkv,nhk->nhv", one, q[:, t]))
        finals.append(one)
    return torch.stack(os, dim=1), torch.cat(finals)


def call(per_key=False, B=2, T=70, N=None):
    """q, k, v, g, beta, S: two key heads, four value heads, more than one chunk."""
    g = -drawn(B, T, 4, *([3] if per_key else []), seed=3).abs()
    made = (
        drawn(B, T, 2, 3, seed=0),
        drawn(B, T, 2, 3, seed=1),
        drawn(B, T, 4, 2, seed=2),
        g,
        drawn(B, T, 4, seed=4).sigmoid(),
        drawn(N or B, 4, 3, 2, seed=5),
    )
    return [x.requires_grad_() for x in made]


def gradients(outputs, inputs):
    loss = sum((y * drawn(*y.shape, seed=9)).sum() for y in outputs)
    return torch.autograd.grad(loss, inputs)


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize(
    "name",
    ["chunk_gated_delta_rule", "chunk_kda", "fused_recurrent_gated_delta_rule", "keeping"],
)
def test_delta_rules_have_the_gradients_of_the_recurrence(name, packed):
    borders = [0, 5, 5, 70] if packed else None
    N = 3 if packed else None
    x = call(per_key=name in ("chunk_kda", "keeping"), B=1 if packed else 2, N=N)
    q, k, v, g, beta, S = x
    kwargs = {"disable_recompute": True} if name == "keeping" else {}
    function = getattr(fla, "chunk_kda" if name == "keeping" else name)
    found = function(
        q,
        k,
        v,
        g=g,
        beta=beta,
        initial_state=S,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=None if borders is None else torch.tensor(borders),
        **kwargs,
    )
    exact = token_by_token(*x, normalize=True, scale=3**-0.5, borders=borders)
    for a, b in zip(found, exact, strict=True):
        assert_within(a, b, CLOSE, name="forward")
    for name, a, b in zip("qkvgbS", gradients(found, x), gradients(exact, x), strict=True):
        assert_within(a, b, CLOSE, name=name)


def test_finite_differences_agree():
    x = call(T=9)

    def run(*x):
        return fla.chunk_gated_delta_rule(*x[:5], initial_state=x[5], output_final_state=True)

    assert torch.autograd.gradcheck(run, x, fast_mode=True)
    assert torch.autograd.gradcheck(
        lambda *x: token_by_token(*x, normalize=False, scale=3**-0.5), x, fast_mode=True
    )


def test_gates_activated_inside_have_gradients_too():
    q, k, v, g, beta, S = call(T=20)
    A_log, dt_bias = drawn(4, seed=6).requires_grad_(), drawn(4, seed=7).requires_grad_()
    options = {"initial_state": S, "output_final_state": True}
    found = fla.chunk_gated_delta_rule(
        q,
        k,
        v,
        g,
        beta,
        use_gate_in_kernel=True,
        A_log=A_log,
        dt_bias=dt_bias,
        use_beta_sigmoid_in_kernel=True,
        allow_neg_eigval=True,
        **options,
    )
    activated = -A_log.exp() * torch.nn.functional.softplus(g + dt_bias)
    exact = token_by_token(
        q, k, v, activated, 2 * beta.sigmoid(), S, normalize=False, scale=3**-0.5
    )
    x = [q, k, v, g, beta, S, A_log, dt_bias]
    for a, b in zip(gradients(found, x), gradients(exact, x), strict=True):
        assert_within(a, b, CLOSE, name="gradient")


def test_a_gradient_of_some_inputs_alone():
    q, k, v, g, beta, S = (x.detach() for x in call(T=20))
    v.requires_grad_()
    o, final = fla.chunk_gated_delta_rule(q, k, v, g, beta)
    assert final is None
    exact, _ = token_by_token(q, k, v, g, beta, 0 * S, normalize=False, scale=3**-0.5)
    assert_within(*(gradients([y], [v])[0] for y in (o, exact)), CLOSE, name="dv")


def test_second_derivatives_are_refused():
    x = call(T=9)
    o, _ = fla.chunk_gated_delta_rule(*x[:5])
    with pytest.raises(SluiceError, match="first derivatives only"):
        torch.autograd.grad(o.sum(), x[:1], create_graph=True)


@pytest.mark.parametrize("W", [2, 4, 7])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_fla_s_convolution(W, activation):
    x = (drawn(1, 12, 3), drawn(3, W), drawn(3), drawn(1, 12, 3, seed=1), drawn(3, 3, W))
    borders = torch.tensor([0, 2, 2, 11])

    def run(x, weight, bias, residual, state):
        return fla.causal_conv1d(
            x,
            weight,
            bias,
            residual,
            state,
            output_final_state=True,
            activation=activation,
            cu_seqlens=borders,
        )

    assert torch.autograd.gradcheck(run, [y.requires_grad_() for y in x], fast_mode=True)


def test_causal_conv1d_s_convolution():
    x = [y.requires_grad_() for y in (drawn(2, 3, 9), drawn(3, 4), drawn(3), drawn(2, 3, 3))]
    numbers = torch.tensor([[0] * 4 + [1] * 5, [2] * 6 + [-1] * 3])

    def with_states(x, weight, bias, states):
        return cc.causal_conv1d_fn(
            x, weight, bias, None, states, return_final_states=True, activation="silu"
        )

    def packed(x, weight, bias):
        return cc.causal_conv1d_fn(x, weight, bias, numbers, activation="silu")

    assert torch.autograd.gradcheck(with_states, x, fast_mode=True)
    assert torch.autograd.gradcheck(packed, x[:3], fast_mode=True)


def test_functions_without_a_gradient_refuse_one():
    """As upstream, these have no gradient; backward raises instead of giving zeros."""
    x = drawn(2, 3).float().requires_grad_()
    y = cc.causal_conv1d_update(x, torch.zeros(2, 3, 3), torch.ones(3, 4))
    with pytest.raises(SluiceError, match="no gradient"):
        y.sum().backward()
    q = drawn(6, 1, 4).float().requires_grad_()
    o = flashinfer_prefill(q, q, q, cu_seqlens=torch.tensor([0, 6]))
    with pytest.raises(SluiceError, match="no gradient"):
        o.sum().backward()
