"""A run: turns, cold inputs, processes that die, time that runs out, first calls."""

from __future__ import annotations

import re
import time
from textwrap import dedent

import pytest
import torch

from sluice.bench import ahead, floors, run, timing_cpu
from sluice.bench import session as sessions
from sluice.bench.check import Answer, copied, nbytes
from sluice.bench.providers.base import Call
from sluice.bench.worker import Local, Worker, WorkerError


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """Two sets of inputs, and floors of small copies."""
    monkeypatch.setattr(sessions, "MOST_SETS", 2)
    monkeypatch.setitem(floors.SIZES, "cpu", (1 << 16, 1 << 18))
    monkeypatch.setitem(floors.MATRIX, "cpu", 64)


def options(**changes):
    settings = {"providers": ("sluice", "torch"), "rounds": 3, "seconds": 0.01, "least": 6}
    return run.Options(**{**settings, "first_calls": False, "quick": True, **changes})


def steps():
    said = []
    return said, said.append


def test_rows_have_times_only_where_the_output_was_right(small):
    said, say = steps()
    results = run.run([small("decode", "N=2"), small("conv_qkv", "5+3")], options(), say)
    assert said[:2] == ["floors", "providers"]
    ok = {(r.workload.split("/")[0], r.provider) for r in results.rows if r.ok}
    assert ok == {("decode", "sluice"), ("decode", "torch"), ("conv_qkv", "sluice")}
    for row in results.rows:
        assert 0 <= row.check_s < 60
        if row.ok:
            assert row.check_s > 0
            assert 0 < row.p10_s <= row.p25_s <= row.median_s <= row.p75_s <= row.p90_s
            assert row.samples >= 6
            assert row.error < 1e-5
            assert row.floor_s > 0
            assert row.share > 0
        else:
            assert row.status == "refused"
            assert row.median_s is None
            assert row.reason
    assert results.machine["threads"] == 1
    assert results.floors["copy"][0]["seconds"] > 0
    assert results.run["rounds"] == 3
    assert results.machine["others"] is None or 0 <= results.machine["others"] <= 1


def test_threads_are_pinned_and_given_back(small):
    before = torch.get_num_threads()
    seen = []

    class Spy(Local):
        def send(self, method, *arguments):
            seen.append(torch.get_num_threads())
            super().send(method, *arguments)

    original, run.Local = run.Local, Spy
    try:
        results = run.run([small("decode", "N=1")], options(threads=2), lambda step: None)
    finally:
        run.Local = original
    assert set(seen) == {2}
    assert results.machine["threads"] == 2
    assert torch.get_num_threads() == before


def test_providers_take_turns_and_another_begins_each_round(small, monkeypatch):
    order = []

    class Spy(Local):
        def send(self, method, *arguments):
            if method == "time":
                order.append(self.name)
            super().send(method, *arguments)

    monkeypatch.setattr(run, "Local", Spy)
    run.run([small("decode", "N=1")], options(), lambda step: None)
    assert order == ["sluice", "torch", "torch", "sluice", "sluice", "torch"]


def test_a_call_that_fails_when_repeated_loses_its_time(small, monkeypatch):
    class Tired(Local):
        def send(self, method, *arguments):
            if method == "time" and self.name == "torch":
                raise RuntimeError("out of breath")
            super().send(method, *arguments)

    monkeypatch.setattr(run, "Local", Tired)
    results = run.run([small("decode", "N=1")], options(), lambda step: None)
    row = results.row("decode/Qwen3.5-27B/tp16/N=1", "torch")
    assert row.status == "error"
    assert row.median_s is None
    assert "out of breath" in row.reason
    assert results.row(row.workload, "sluice").ok


def test_eager_calls_are_timed_in_every_round_where_the_output_was_right(small, monkeypatch):
    asked = []

    class Eager(Local):
        def send(self, method, *arguments):
            if method != "eager":
                return super().send(method, *arguments)
            asked.append((self.name, *arguments))
            self.reply = {"host": [2.0, 1.0], "wall": [float(len(asked))]}
            return None

    monkeypatch.setattr(run, "Local", Eager)
    chosen = [small("conv_qkv", "5+3")]  # torch refuses packed prompts
    results = run.run(chosen, options(eager_seconds=0.3), lambda step: None)
    assert asked == [("sluice", pytest.approx(0.1))] * 3
    ours, torchs = results.rows
    assert (ours.host.median_s, ours.host.samples) == (1.5, 6)
    assert (ours.eager.median_s, ours.eager.samples) == (2.0, 3)
    assert ours.median_s is not None
    assert torchs.status == "refused"
    assert torchs.host is torchs.eager is None


def test_an_eager_call_that_fails_loses_the_row_its_times(small):
    """On a CPU there is no eager timer, which is failure enough."""
    results = run.run([small("decode", "N=1")], options(eager_seconds=0.3), lambda step: None)
    for row in results.rows:
        assert row.status == "error"
        assert row.median_s is row.host is row.eager is None


def test_what_is_left_when_the_time_is_spent_is_listed(small):
    results = run.run([small("decode", "N=1")], options(time_limit=0.0), lambda step: None)
    assert {r.status for r in results.rows} == {"skipped"}
    assert all("spent" in r.reason for r in results.rows)


def test_what_there_is_is_kept_after_each_workload(small):
    kept = []
    chosen = [small("decode", "N=1"), small("decode", "N=2")]
    results = run.run(chosen, options(), lambda step: None, lambda r: kept.append(len(r.rows)))
    assert kept == [2, 4]
    assert "unfinished" not in results.run


def test_sets_of_inputs_are_larger_than_the_cache(small, monkeypatch):
    monkeypatch.setattr(sessions, "MOST_SETS", 64)
    monkeypatch.setattr(timing_cpu, "cache_bytes", lambda: 4 << 20)
    inputs = small("decode", "N=1").case.inputs(torch.float32)
    sets = sessions.Session("sluice", "cpu", 1)._sets(inputs)
    assert sets * nbytes(inputs) >= 3 * (4 << 20)
    assert (sets - 1) * nbytes(inputs) < 3 * (4 << 20)


def test_copies_share_their_indices_and_nothing_else(small):
    inputs = small("step", "N=3").case.inputs(torch.float32)
    other = copied(inputs)
    assert other["slots"] is inputs["slots"]
    assert other["state"].data_ptr() != inputs["state"].data_ptr()
    assert all(a is not b for a, b in zip(other["qkvz"], inputs["qkvz"], strict=True))
    assert torch.equal(other["qkvz"][0], inputs["qkvz"][0])


def test_the_clock_is_around_the_call_and_every_set_has_its_turn():
    turns = []

    def call(n):
        return Call(lambda: (turns.append(n), time.sleep(0.002)), dict)

    timer = timing_cpu.Timer([call(n) for n in range(3)])
    timer.warm_up()
    samples = timer.block(0.0, 5, 1.0) + timer.block(0.0, 5, 1.0)
    assert len(samples) == 10
    assert min(samples) >= 0.002
    assert set(turns[3:]) == {0, 1, 2}
    assert len(turns[3:]) == 2 * (1 + 5)  # the first of a block finds another's caches: not counted
    assert len(timer.block(10.0, 1000, 0.01)) < 20  # the limit ends it


# ------------------------------------------------------------------------------------- processes

CRASH = """
import ctypes, os
class TensorProto: FLOAT = 1; INT64 = 7
class helper:
    def __getattr__(self, name): return lambda *a, **k: self
    def SerializeToString(self): return b""
helper = helper()
"""
DIES = """
class SessionOptions:
    def __setattr__(self, *a): pass
    def add_session_config_entry(self, *a): pass
def InferenceSession(*args, **kwargs):
    import os, sys
    print("about to fall over", file=sys.stderr, flush=True)
    {how}
"""


@pytest.fixture
def broken(tmp_path):
    """A directory with a fake onnxruntime that ends its process, hangs, or raises."""

    def make(how):
        (tmp_path / "onnx.py").write_text(dedent(CRASH))
        (tmp_path / "onnxruntime.py").write_text(dedent(DIES.format(how=how)))
        return {"onnxruntime": [str(tmp_path)]}

    return make


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("os._exit(3)", r"process ended with status 3: about to fall over"),
        ("os.kill(os.getpid(), 11)", r"process ended by SIGSEGV: about to fall over"),
        pytest.param("import time; time.sleep(60)", r"no answer in 3 s", marks=pytest.mark.slow),
    ],
)
def test_a_peer_that_takes_its_process_down_costs_its_own_rows_only(how, reason, broken, small):
    results = run.run(
        [small("decode", "N=1"), small("decode", "N=2")],
        options(
            isolate=True, providers=("sluice", "onnxruntime"), paths=broken(how), rounds=1,
            timeout=3.0 if "sleep" in how else 60.0,
        ),
        lambda step: None,
    )  # fmt: skip
    for n in (1, 2):
        workload = f"decode/Qwen3.5-27B/tp16/N={n}"
        row = results.row(workload, "onnxruntime")
        assert row.status == "error"
        assert re.search(reason, row.reason), row.reason
        assert row.median_s is None
        if "sleep" not in how:  # the short timeout is for everyone
            assert results.row(workload, "sluice").ok


def test_a_process_of_its_own_gives_the_same_answers(small):
    """Inputs and answer pass through a file; host lengths stay on the host."""
    workload = small("prefill", "9+4")
    sources = ahead.Sources([workload], options(isolate=True))
    source = sources.take(workload)
    assert isinstance(source, str)
    worker = Worker("sluice", "cpu", 1)
    try:
        worker.send("start")
        assert worker.receive(60)["missing"] is None
        worker.send("check", workload, torch.float32, source)
        verdict = worker.receive(60)
        assert verdict["status"] == "ok", verdict["reason"]
        worker.send("time", 0.0, 3, 1.0)
        assert len(worker.receive(60)) == 3
        worker.send("time", "nonsense")
        with pytest.raises(WorkerError, match="TypeError"):
            worker.receive(60)
        worker.send("eager", 0.01)  # reaches the session, whose timer on a CPU has no such times
        with pytest.raises(WorkerError, match=r"AttributeError.*eager"):
            worker.receive(60)
    finally:
        worker.close()
        sources.close()
    assert worker.process.returncode is not None


def test_first_calls_are_measured_in_a_fresh_process_with_empty_caches(small):
    said, say = steps()
    chosen = [small("decode", "N=2"), small("decode", "N=1"), small("verify", "N=1")]
    results = run.run(chosen, options(first_calls=True, providers=("sluice",)), say)
    (first,) = results.first_calls
    assert first["provider"] == "sluice"
    assert first["workload"].endswith("N=1")  # the smallest of its operator
    assert first["call_s"] > 0
    assert "first call of sluice" in said


def test_isolated_runs_note_the_first_call_of_each_operator(small):
    chosen = [small("decode", "N=1"), small("decode", "N=2"), small("rms_norm_gated", "3")]
    results = run.run(
        chosen,
        options(isolate=True, first_calls=True, providers=("torch",), rounds=1),
        lambda step: None,
    )
    assert [x["op"] for x in results.first_calls] == ["decode", "rms_norm_gated"]
    assert results.first_calls[1]["import_s"] == 0.0  # already imported


def test_the_environment_of_a_peer_is_set_in_its_own_process(tmp_path):
    (tmp_path / "flash_qla.py").write_text("import os\n__version__ = os.environ['PYTHONPATH']\n")
    worker = Worker("sluice", "cpu", 1, [str(tmp_path)], cold=True)
    try:
        worker.send("start")
        assert worker.receive(60)["version"]
        assert worker.caches is not None
    finally:
        worker.close()


# ---------------------------------------------------------------------------------------- floors


def test_a_floor_is_the_longer_of_a_copy_and_a_product():
    measured = floors.Floors([(1000, 1e-6), (2000, 3e-6), (4000, 5e-6)], {"float32": 1e9})
    assert measured.copy_seconds(10) == 1e-6
    assert measured.copy_seconds(1500) == pytest.approx(2e-6)
    assert measured.copy_seconds(8000) == pytest.approx(1e-5)
    assert measured.seconds(1000, 100, "float32") == (1e-6, "memory")
    assert measured.seconds(1000, 5000, "float32") == (5e-6, "compute")
    assert floors.Floors.from_json(measured.to_json()).copies == measured.copies


def test_floors_are_measured_here_and_now():
    measured = floors.measure(torch.device("cpu"), torch.float32, quick=True)
    assert [size for size, _ in measured.copies] == [1 << 16, 1 << 18]
    assert all(seconds > 0 for _, seconds in measured.copies)
    assert measured.matrix["float32"] > 1e6
    assert measured.bandwidth > 1e6


def test_an_answer_needs_every_output(small):
    workload = small("decode", "N=1")
    answer = Answer.of(workload, workload.case.inputs(torch.float32), torch.float32)
    with pytest.raises(AssertionError, match="no state among"):
        answer.judge({"o": answer.exact["o"]})
