"""Kernels that a peer tunes: at which size, and only by processes that really measure.

The tests use Triton's own tuner and its file on disk, if Triton is installed. They need no GPU: the
kernels are stand-ins, and only the tuner is real.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from tests.bench.stand_ins import Spy

from sluice.bench import ahead, plan, run
from sluice.bench import session as sessions
from sluice.bench.check import Answer
from sluice.bench.peer_environment import for_peers
from sluice.bench.providers import provider

LATER = 1e9  # seconds on the steady clock

# ----------------------------------------------------------------------------- without measuring


SECONDS = {16: 3.0, 32: 1.0, 64: 2.0}  # of each form


class Tuned:
    """A kernel of three forms behind Triton's tuner."""

    def __init__(self, triton, monkeypatch):
        from triton.backends.compiler import GPUTarget
        from triton.runtime.driver import driver

        self.triton, self.ran = triton, []
        active = SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", 90, 32),
            get_benchmarker=lambda: triton.testing.do_bench,
        )
        monkeypatch.setattr(driver, "_active", active)
        monkeypatch.setattr(triton.testing, "do_bench", self._measure)

    def _measure(self, call, quantiles):
        call()
        return [SECONDS[self.ran[-1]]] * len(quantiles)

    def tuner(self):
        """The state of a new process: nothing in memory, results on disk."""
        kernel = self.triton.jit(_kernel)
        kernel.run = lambda *_, BLOCK, **__: self.ran.append(BLOCK)
        forms = [self.triton.Config({"BLOCK": x}) for x in SECONDS]
        return self.triton.autotune(configs=forms, key=["n"], cache_results=True)(kernel)


def _kernel(x, n, BLOCK):
    pass


@pytest.fixture
def tuned(monkeypatch, tmp_path):
    triton = pytest.importorskip("triton", reason="needs the triton extra")
    if triton.knobs.runtime.interpret:
        pytest.skip("Triton's interpreter keeps no results on disk")
    import triton.testing

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return Tuned(triton, monkeypatch)


def compiled(small, monkeypatch, tuner):
    """A session that has compiled a workload whose call goes through ``tuner``."""
    session, workload = sessions.Session("torch", "cpu", 1), small("decode", "N=1")
    inner = session.provider.prepare

    def prepare(job):
        tuner.run(torch.zeros(4), 4, grid=(1,))
        return inner(job)

    monkeypatch.setattr(session.provider, "prepare", prepare)
    inputs = workload.case.inputs(torch.float32)
    answer = Answer.of(workload, inputs, torch.float32)
    seconds, _ = session.compile(workload, torch.float32, (inputs, answer), LATER)
    assert seconds is not None
    return session, workload, (inputs, answer)


def test_what_a_helper_compiled_changes_no_choice_of_the_runner(
    small, monkeypatch, tuned, tmp_path
):
    """With results on disk enabled, a helper runs every form, and neither writes nor reads them."""
    compiled(small, monkeypatch, tuned.tuner())
    assert tuned.ran[:3] == [16, 32, 64]
    assert not list(tmp_path.rglob("*.autotune.json"))
    runner = tuned.tuner()
    runner.run(torch.zeros(4), 4, grid=(1,))
    assert runner.best_config.kwargs == {"BLOCK": 32}  # the fastest, not the first
    # and the measured times are stored, as the library asked
    (kept,) = tmp_path.rglob("*.autotune.json")
    times = [x[0] for _, x in json.loads(kept.read_text())["configs_timings"]]
    assert times == [3.0, 1.0, 2.0]
    before = kept.read_text()
    compiled(small, monkeypatch, tuned.tuner())
    assert kept.read_text() == before


def test_who_compiled_without_measuring_is_not_timed(small, monkeypatch, tuned):
    session, workload, source = compiled(small, monkeypatch, tuned.tuner())
    verdict = session.check(workload, torch.float32, source)
    assert verdict["status"] == "error"
    assert "without measuring" in verdict["reason"]


def test_nothing_is_left_changed(small, monkeypatch, tuned):
    from triton.runtime.autotuner import Autotuner

    before = Autotuner.check_disk_cache, tuned.triton.testing.do_bench
    compiled(small, monkeypatch, tuned.tuner())
    assert (Autotuner.check_disk_cache, tuned.triton.testing.do_bench) == before


def test_a_process_of_a_run_reads_and_keeps_no_tuning_results(monkeypatch):
    """Whatever the caller's environment, runners measure and helpers store nothing."""
    for name in ("FLA_CACHE_RESULTS", "TRITON_CACHE_AUTOTUNING"):
        monkeypatch.setenv(name, "1")
    for name in ("FLA_DISABLE_BACKEND_DISPATCH", "TRANSFORMERS_VERBOSITY"):
        monkeypatch.setenv(name, "1")
    for_peers()
    code = (
        "import os; print(os.environ['FLA_CACHE_RESULTS'], os.environ['TRITON_CACHE_AUTOTUNING'])"
    )
    child = [sys.executable, "-c", code]
    assert subprocess.run(child, capture_output=True, text=True, check=True).stdout == "0 0\n"


# -------------------------------------------------------------------------------- at which size


def crew_of(monkeypatch, names, chosen):
    """A crew of spies after it was sent these workloads."""
    monkeypatch.setattr(ahead, "Worker", Spy)
    runners = {name: Spy() for name in names}
    crew = ahead.Crew(runners, run.Options(isolate=True), time.monotonic() + 9, chosen)
    for workload in ahead.spread(chosen):
        crew.send(workload, "file")
    return crew


def test_what_has_the_same_kernels_is_tuned_once(small, monkeypatch):
    """FLA tunes its norms for every 65,536 rows, and its prefill for each number of heads only."""
    chosen = [small("prefill", "9"), small("prefill", "3x5"), small("prefill", "9", raw=True)]
    chosen += [small("conv_qkv", "9"), small("conv_qkv", "5"), small("conv_qkv", "40000")]
    chosen += [small("conv_qkv", "N=2"), small("decode", "N=1"), small("decode", "N=2")]
    crew = crew_of(monkeypatch, ("fla", "sluice"), chosen)
    late = [chosen[n] for n in (0, 2, 3, 5, 6)]
    assert {w.name for _, w, _ in crew.late} == {w.name for w in late}
    # decode has nothing to tune: both are compiled, and not by the process that tunes
    asked = {w.name for n, _, w in crew.sent if n == "fla"}
    assert asked == {w.name for w in [*late, *chosen[7:]]}
    assert [w for n, _, w in crew.sent if n == "sluice"] == ahead.spread(chosen)
    crew.close()


def test_a_batch_is_tuned_at_64_sequences_and_large_ones_come_first(monkeypatch):
    """With one sequence all forms of a convolution take the same time, so chance would choose."""
    chosen = plan.workloads("cuda", plan.Wanted(), torch.bfloat16)
    crew = crew_of(monkeypatch, ("fla",), chosen)
    crew.tune(LATER, lambda *_: None)
    order = [w for _, w in crew.runners["fla"].asked]
    tokens = [w.size.tokens for w in order]
    assert tokens == sorted(tokens, reverse=True)
    assert {str(w.size) for w in order if w.size.lengths is None} == {"N=64"}
    assert "step/Qwen3.5-35B-A3B/tp1/N=64" in [w.name for w in order]
    # prompts are tuned at the surface's first size
    prefills = {str(w.size) for w in order if w.op == "prefill" and not w.variant}
    assert prefills == {"8192"}


def test_of_other_batches_the_nearest_is_taken(small):
    fla = provider("fla")
    few = [small("step", f"N={n}") for n in (1, 8, 300)]
    assert fla.tuned_at(few) is few[1]
    assert provider("flashqla").tuned_at(few) is few[0]
