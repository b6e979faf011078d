"""The backward of the recurrence, one token after the other, from the last to the first.

With S the state after a token, S' the decayed state before it, e = v − S'ᵀk and d = beta e:

    dS += q doᵀ              dq = S do
    dk  = dS d − S' de       dd = dSᵀ k,  de = beta dd,  dbeta = e · dd,  dv = de
    dS' = dS − k deᵀ         dg = Σ S' ∘ dS'  (over V for decay per key),  dS = exp(g) dS'

Without beta, d = v and S' is read by nothing: dv = dd. It keeps every state of a sequence.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sluice.backends.reference.backward import Gradients, Inputs, inputs, store
from sluice.backends.reference.recurrence import Tokens, decayed, over_value_heads, update


def prefill_backward(p: Any, t: Any) -> None:
    """Serve the backward of ``prefill``."""
    t, call = inputs(p, t)
    store(p, t, call.x, recurrence_backward(call))


def recurrence_backward(call: Inputs) -> Gradients:
    """Gradients of all tokens and initial states."""
    x = call.x
    made = [None if y is None else torch.zeros_like(y) for y in x]
    dS = call.dfinal.clone()
    for states, start, stop in call.spans:
        views = Tokens(*(None if y is None else y[:, start:stop] for y in made))
        dS[states] = _sequences(
            x.span(start, stop), call.S[states], call.do[:, start:stop], dS[states], views
        )
    return Gradients(*made, dS)


def _sequences(x: Tokens, S: Tensor, do: Tensor, dS: Tensor, made: Tokens) -> Tensor:
    """Sequences of equal length; writes ``made``, returns the gradient of their first states."""
    N, T, HV, V = x.v.shape
    HQ, HK, K = x.q.shape[2], x.k.shape[2], x.k.shape[3]
    G = max(HQ // HV, 1)  # query heads that read one state
    k_v = [over_value_heads(x.k[:, i], HV) for i in range(T)]
    states = [S]
    before = []
    for i in range(T):
        S = decayed(states[-1], None if x.g is None else x.g[:, i])
        before.append(S)
        d = x.v[:, i]
        if x.beta is not None:
            d = x.beta[:, i].unsqueeze(-1) * (d - (S * k_v[i].unsqueeze(-1)).sum(-2))
        states.append(update(S, k_v[i], d))
    for i in reversed(range(T)):
        S, S_in, k = states[i + 1], before[i], k_v[i]
        q = x.q[:, i] if HQ > HV else over_value_heads(x.q[:, i], HV)
        q, out = q.view(N, HV, G, K), do[:, i].view(N, HV, G, V)
        dS = dS + (q.unsqueeze(-1) * out.unsqueeze(-2)).sum(2)
        dq = (S.unsqueeze(2) * out.unsqueeze(-2)).sum(-1)  # [N, HV, G, K]
        made.q[:, i] = dq.reshape(N, HQ, -1, K).sum(2)
        dd = (dS * k.unsqueeze(-1)).sum(-2)
        if x.beta is None or made.beta is None:
            made.v[:, i] = dd
            dk = (dS * x.v[:, i].unsqueeze(-2)).sum(-1)
        else:
            beta = x.beta[:, i].unsqueeze(-1)
            e = x.v[:, i] - (S_in * k.unsqueeze(-1)).sum(-2)
            de = beta * dd
            made.v[:, i] = de
            made.beta[:, i] = (e * dd).sum(-1)
            dk = (dS * (beta * e).unsqueeze(-2)).sum(-1) - (S_in * de.unsqueeze(-2)).sum(-1)
            dS = dS - k.unsqueeze(-1) * de.unsqueeze(-2)
        made.k[:, i] = dk.view(N, HK, HV // HK, K).sum(2)
        if x.g is not None and made.g is not None:
            by_key = (S_in * dS).sum(-1)
            made.g[:, i] = by_key if x.g.dim() == 4 else by_key.sum(-1)
            dS = decayed(dS, x.g[:, i])
    return dS
