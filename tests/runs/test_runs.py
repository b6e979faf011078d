"""Random long runs in the suite: 20,000 steps, and that they can fail.

``make runs STEPS=1000000`` runs more of the same; docs/reliability.md has the counts.
"""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from sluice.backends import triton
from sluice.state_pool import StatePool
from sluice.testing import compare, oracle
from sluice.testing.inputs import generator, normal
from tests.gpu.emulator import machine
from tests.runs import __main__ as command
from tests.runs import episode, exact
from tests.suite import DEVICE

EPISODES = 20


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_an_engine_that_rolls_dice_keeps_to_the_exact_sequences(part):
    """The seeds never change: a failure is the code's. Its message has the command to replay it."""
    each = EPISODES // 4
    for seed in range(1 + part * each, 1 + (part + 1) * each):
        try:
            episode.run(seed, device=DEVICE)
        except episode.EpisodeError as failed:
            pytest.fail(episode.report(failed, DEVICE), pytrace=False)


@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU need not be emulated")
@pytest.mark.filterwarnings("ignore::sluice.SlowPathWarning")
@pytest.mark.parametrize(("seed", "steps"), [(2063, 16)])
def test_an_engine_on_an_emulated_gpu(seed, steps):
    """Compiled kernels, without a GPU. In 2063 the state at a checkpoint once had other bits."""
    pytest.importorskip("triton")
    if reason := machine.missing():
        pytest.skip(reason)
    if triton.interpreted():
        pytest.skip("kernels are not compiled there")
    try:
        episode.run(seed, steps, "sm_90")
    except episode.EpisodeError as failed:
        pytest.fail(episode.report(failed, "sm_90"), pytrace=False)


# ------------------------------------------------------------------------- the judge is judged


def test_the_exact_sequences_are_the_oracles():
    gen = generator(3)
    R, T, Hk, Hv, K, V = 3, 5, 2, 4, 8, 6
    q, k, v = normal(gen, R, T, Hk, K), normal(gen, R, T, Hk, K), normal(gen, R, T, Hv, V)
    a, b, A_log, dt_bias = (normal(gen, *s) for s in ((R, T, Hv), (R, T, Hv), (Hv,), (Hv,)))
    state = normal(gen, R, Hv, K, V)
    raw = {"A_log": A_log, "dt_bias": dt_bias, "neg_eigval": True}
    want, after = oracle.delta(
        q, k, v, a, b, state=state, state_layout="kv", normalize_qk=True, **raw
    )
    gates = exact.gates(a, b, A_log.expand(R, Hv), dt_bias.expand(R, Hv), True)
    o, states = exact.recurrence(state, exact.normalised(q), exact.normalised(k), v, *gates)
    compare.assert_within(o, want, compare.FLOAT64, name="o")
    compare.assert_within(states[-1], after, compare.FLOAT64, name="state")


@pytest.mark.parametrize("T", [0, 1, 7])
def test_the_exact_convolution_is_the_oracles(T):
    gen = generator(4)
    R, D, W, L = 2, 5, 4, 6
    x, weight, bias, window = (normal(gen, *s) for s in ((R, T, D), (D, W), (D,), (R, D, L)))
    want, after = oracle.conv(x, weight, bias, state=window)
    y, stream = exact.convolve(window, x, weight.expand(R, D, W), bias.expand(R, D), True)
    compare.assert_within(y, want, compare.FLOAT64, name="y")
    assert torch.equal(stream[..., T:], after)


def test_the_exact_norm_is_the_oracles():
    x, z, weight = (normal(generator(5), *s) for s in ((3, 4, 8), (3, 4, 8), (8,)))
    want = oracle.rms_norm_gated(x, z, weight, activation="sigmoid")
    got = exact.gated_norm(x, z, weight, 1e-6, "sigmoid")
    compare.assert_within(got, want, compare.FLOAT64, name="norm")


# --------------------------------------------------------------------------------- it can fail


def _found(seeds: range) -> episode.EpisodeError:
    for seed in seeds:
        try:
            episode.run(seed, 200)
        except episode.EpisodeError as failed:
            return failed
    pytest.fail("the fault was not noticed")


@pytest.mark.skipif(DEVICE != "cpu", reason="one device suffices")
def test_a_fault_is_found_made_small_and_printed_with_its_command(monkeypatch):
    """A fork that forgets the last layer's conv window: two or three actions show it."""
    right = StatePool.fork

    def wrong(self, slots, copies=1):
        new = right(self, slots, copies)
        self.layer(self.geometry.layers - 1)[0][[int(s) for s in new]] = 0.5
        return new

    monkeypatch.setattr(StatePool, "fork", wrong)
    failed = _found(range(1, 9))
    text = episode.report(failed, "cpu")
    assert "a fork" in text
    suffice = int(text.split("\n")[2].split()[0])
    assert suffice <= 4 < len(failed.actions)
    assert f"python -m tests.runs --seed {failed.seed} --only " in text
    monkeypatch.undo()
    episode.replay(failed.seed, failed.actions)


@pytest.mark.skipif(DEVICE != "cpu", reason="one device suffices")
@pytest.mark.parametrize("code", [0, 1, -11], ids=["pass", "a fault", "a crash"])
def test_several_processes_pass_only_if_each_of_them_does(code, monkeypatch, capsys):
    codes = iter([0, code, 0])
    monkeypatch.setattr(subprocess, "Popen", lambda line: SimpleNamespace(wait=lambda: next(codes)))
    monkeypatch.setattr(sys, "argv", ["runs", "--steps", "5000", "--seed", "7", "--workers", "3"])
    assert command.main() == int(code != 0)
    told = "pass" if code == 0 else "FAILED"
    assert capsys.readouterr().out == f"3 processes, seeds 7 to 11: {told}\n"


def test_a_byte_beside_the_rows_of_a_call_is_seen(monkeypatch):
    """A free that touches the row of another sequence."""
    right = StatePool.free

    def wrong(self, slots):
        right(self, slots)
        for slot in self.allocated[:1]:
            self.layer(0)[1][int(slot), 0, 0, 0] += 1.0

    monkeypatch.setattr(StatePool, "free", wrong)
    assert "changed" in str(_found(range(1, 5)).error)
