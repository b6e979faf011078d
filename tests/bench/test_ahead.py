"""Before the first row: inputs, answers and kernels, made ahead by all processes in parallel."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.bench.stand_ins import Spy

from sluice.bench import ahead, floors, run
from sluice.bench import session as sessions
from sluice.bench.check import Answer, side_by_side
from sluice.bench.providers import provider
from sluice.bench.worker import Worker, WorkerError


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(sessions, "MOST_SETS", 2)
    monkeypatch.setitem(floors.SIZES, "cpu", (1 << 16, 1 << 18))
    monkeypatch.setitem(floors.MATRIX, "cpu", 64)
    monkeypatch.setattr(ahead, "LEAST_ROOM", 0)  # small files fit even on a full disk


def options(**changes):
    settings = {"providers": ("sluice", "torch"), "rounds": 1, "seconds": 0.01, "least": 2}
    return run.Options(**{**settings, "first_calls": False, "quick": True, **changes})


# ----------------------------------------------------------------------------- inputs and answers


def test_inputs_are_drawn_ahead_for_another_device(small, monkeypatch):
    """Inputs drawn ahead on the host are the same numbers."""
    monkeypatch.setattr(ahead, "LOOK_AHEAD", 1)
    chosen = [small("prefill", "9+2"), small("step", "N=2"), small("decode", "N=1")]
    draws = ahead.Draws(chosen, options(device="meta"))
    first = draws.take(chosen[0])
    assert list(draws.ahead) == [chosen[1].name]
    assert first["q"].device.type == "meta"
    assert first["cu_seqlens_cpu"].device.type == "cpu"
    drawn = draws.ahead[chosen[1].name].result()
    assert torch.equal(drawn["qkvz"][0], chosen[1].case.inputs(torch.float32)["qkvz"][0])
    assert draws.take(chosen[1])["qkvz"][0].device.type == "meta"
    assert list(draws.ahead) == [chosen[2].name]
    draws.close()


def test_a_file_holds_what_the_process_would_have_made(small):
    workload = small("prefill", "9+4")
    here = ahead.Sources([workload], options())
    there = ahead.Sources([workload], options(isolate=True))
    inputs, answer = here.take(workload)
    path = there.take(workload)
    assert there.take(workload) == path  # made once
    read, known = sessions.Session("sluice", "cpu", 1)._load(path)
    assert torch.equal(read["v"], inputs["v"])
    assert torch.equal(known.exact["o"], answer.exact["o"])
    assert known.limits == answer.limits
    assert sessions.Session("sluice", "cpu", 1)._load(path, answer=False)[1] is None
    there.drop(workload)
    assert not Path(path).exists()
    here.close()
    there.close()
    assert not Path(there.folder.name).exists()


def test_files_are_kept_in_memory_only_where_there_is_room(monkeypatch, tmp_path):
    monkeypatch.setattr(ahead, "MEMORY_FOLDER", tmp_path)
    monkeypatch.setattr(ahead, "ROOM", 0)
    assert ahead._place() == str(tmp_path)
    monkeypatch.setattr(ahead, "ROOM", 1 << 60)
    assert ahead._place() is None
    monkeypatch.setattr(ahead, "MEMORY_FOLDER", tmp_path / "none")
    assert ahead._place() is None


@pytest.mark.parametrize("raw", [False, True])
def test_equal_prompts_side_by_side_are_what_they_are_one_by_one(small, raw):
    """The oracle runs them as heads of one prompt, with the same numbers."""
    workload = small("prefill", "3x7", raw=raw, model="Qwen3.5-397B-A17B", tp=8)
    case = workload.case
    inputs = case.inputs(torch.float32)
    found = side_by_side(inputs, 3)
    expected = case.expected(inputs)
    rows = expected.pools["state"].exact[inputs["slots"].long()]
    torch.testing.assert_close(found["o"], expected.outputs["o"], rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(found["state"], rows, rtol=1e-12, atol=1e-13)
    answer = Answer.of(workload, inputs, torch.float32)
    assert torch.equal(answer.exact["o"], found["o"])
    assert answer.limits == expected.limits


# ---------------------------------------------------------------------------------------- kernels


def crew_of(monkeypatch, names, chosen):
    """The helpers, the runners and the crew for these workloads, all of them spies."""
    helpers = []
    monkeypatch.setattr(
        ahead, "Worker", lambda *a, **k: helpers.append(Spy(*a, **k)) or helpers[-1]
    )
    runners = {name: Spy() for name in names}
    later = time.monotonic() + 9
    return helpers, runners, ahead.Crew(runners, options(isolate=True), later, chosen)


def test_helpers_compile_what_is_found_on_disk(small, monkeypatch):
    names = ("flashqla", "flashinfer", "sluice:separate", "torch")
    prefill, many, other = (
        small("prefill", "9"),
        small("prefill", "3x9"),
        small("prefill", "7", tp=8),
    )
    decode = small("decode", "N=1", tp=8)
    chosen = [prefill, many, other, decode, small("prefill", "11")]
    helpers, runners, crew = crew_of(monkeypatch, names, chosen)
    for workload in chosen:
        crew.send(workload, "file")
    asked = [(x.arguments[0], [w for _, w in x.asked]) for x in helpers]
    # one per number of heads, and for prompts that are split; only decode's kernels are on disk
    assert asked == [
        ("flashqla", [prefill, chosen[4]]),
        ("flashqla", [many]),
        ("flashqla", [other]),
        ("flashinfer", [decode]),
    ]
    assert all(x.options == {"caches": "shared"} for x in helpers)
    assert {how for x in helpers for how, _ in x.asked} == {"compile"}
    assert {how for x in runners.values() for how, _ in x.asked} == {"prime"}
    assert [w for _, w in runners["flashqla"].asked] == [decode]
    assert [w for _, w in runners["flashinfer"].asked] == [w for w in chosen if w is not decode]
    assert [w for _, w in runners["sluice:separate"].asked] == chosen  # shares with sluice
    assert not runners["torch"].asked  # compiles nothing
    noted = []
    crew.wait(lambda name, workload, seconds: noted.append((name, workload.name)))
    assert len(noted) == 15
    crew.close()
    assert all(x.closed for x in helpers)


def test_one_of_each_kind_comes_first(small):
    a, b = small("prefill", "9"), small("prefill", "11")
    c, d, e = small("prefill", "2x9"), small("prefill", "9", tp=8), small("decode", "N=1")
    assert ahead.spread([a, b, c, d, e]) == [a, c, d, e, b]


def test_time_is_kept_for_those_who_measure_to_choose(small, monkeypatch):
    monkeypatch.setattr(ahead, "Worker", Spy)
    seen = {}

    class Notes(Spy):
        def send(self, method, *arguments):
            seen.setdefault(self.arguments or "runner", arguments[-1])

    monkeypatch.setattr(ahead, "Worker", lambda name, *a, **k: Notes(name))
    workload = small("prefill", "9")
    sources = ahead.Sources([workload], options(isolate=True))
    begin = time.monotonic()
    ahead.compile_all(
        [workload], {"fla": Notes()}, sources, options(isolate=True), begin + 100, lambda *_: None
    )
    sources.close()
    assert seen["runner"] == begin + 100
    assert seen[("fla",)] == pytest.approx(begin + 70, abs=5)


def test_rows_have_as_much_time_as_they_take(small, monkeypatch):
    """The time before the first row is what the rows leave, and at least a fixed share."""
    ends = []
    monkeypatch.setattr(run, "compile_all", lambda *a: ends.append(a[4]) or {})
    for limit, count in ((440.0, 74), (100.0, 74)):
        asked = options(isolate=True, time_limit=limit)
        run._ahead([small("decode", "N=1")] * count, {}, None, asked, None, 0.0)
    assert ends == [440.0 - 74 * ahead.ROW_SECONDS, 100.0 * ahead.SHARE]


def test_who_tunes_has_everything_compiled_by_helpers_and_measures_alone_at_the_end(
    small, monkeypatch
):
    """Tuning while others use the device would choose badly."""
    order = []

    class Notes(Spy):
        def send(self, method, workload, *rest):
            order.append((self.arguments[:1] or ("runner",), workload.name))
            super().send(method, workload, *rest)

        def close(self):
            order.append((("helper closed",), ""))

    monkeypatch.setattr(ahead, "Worker", Notes)
    chosen = [small("prefill", "9"), small("decode", "N=1"), small("prefill", "7", tp=8)]
    runners = {"fla": Notes()}
    sources = ahead.Sources(chosen, options(isolate=True))
    later = time.monotonic() + 60
    ahead.compile_all(chosen, runners, sources, options(isolate=True), later, lambda *_: None)
    sources.close()
    names = [w.name for w in chosen]
    assert order[:3] == [(("fla",), name) for name in names]
    assert [who for who, _ in order[3:6]] == [("helper closed",)] * 3
    assert order[6:] == [(("runner",), names[0]), (("runner",), names[2])]  # decode has one form


def test_a_runner_that_breaks_while_it_compiles_begins_again(small):
    class Dies(Spy):
        def receive(self, timeout):
            raise WorkerError("gone")

    class Spoilt(Spy):
        def receive(self, timeout):
            return None, len(self.asked) == 2

    chosen = [small("decode", "N=1"), small("decode", "N=2")]
    runners = {"sluice:separate": Dies(), "sluice": Spoilt(), "sluice:invariant": Spy()}
    crew = ahead.Crew(runners, options(isolate=True), time.monotonic() + 9, chosen)
    for workload in chosen:
        crew.send(workload, "file")
    crew.wait(lambda *_: None)
    assert [runners[name].restarts for name in runners] == [1, 1, 0]


def test_priming_runs_a_workload_once_and_judges_nothing(small):
    workload, refused = small("decode", "N=1"), small("causal_conv1d", "5+3")
    sources = ahead.Sources([workload, refused], options(isolate=True))
    session = sessions.Session("torch", "cpu", 1)
    later = time.monotonic() + 60
    seconds, fatal = session.prime(workload, torch.float32, sources.take(workload), later)
    assert seconds > 0
    assert not fatal
    assert session.prime(refused, torch.float32, sources.take(refused), later) == (None, False)
    # too late: nothing is started, and the file is not read
    assert session.prime(workload, torch.float32, "none", time.monotonic() - 1) == (None, False)
    sources.close()


def test_a_helper_measures_nothing(small, monkeypatch):
    """Triton's tuner times a kernel when it is first called; in a helper it does not."""
    calls = []
    testing = SimpleNamespace(do_bench=lambda *_, **__: calls.append("measured"))
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(testing=testing))
    monkeypatch.setitem(sys.modules, "triton.testing", testing)
    session = sessions.Session("torch", "cpu", 1)
    inner = session.provider.prepare

    def prepare(job):
        done = testing.do_bench(lambda: calls.append("run"), quantiles=(0.5, 0.2, 0.8))
        calls.append(done)
        return inner(job)

    monkeypatch.setattr(session.provider, "prepare", prepare)
    workload = small("decode", "N=1")
    sources = ahead.Sources([workload], options(isolate=True))
    later = time.monotonic() + 60
    assert session.compile(workload, torch.float32, sources.take(workload), later)[0] > 0
    assert calls == ["run", [0.0, 0.0, 0.0]]
    session.prime(workload, torch.float32, sources.take(workload), later)
    assert calls[2:] == ["measured", None]
    sources.close()


def test_a_run_with_everything_ahead_gives_the_same_rows(small, monkeypatch):
    monkeypatch.setattr(type(provider("torch")), "compiles", "process")
    monkeypatch.setattr(run, "SLOW_SECONDS", 0.0)
    chosen = [small("decode", "N=1"), small("causal_conv1d", "5+3")]
    chosen.append(small("rms_norm_gated", "5"))
    said = []
    asked = options(isolate=True, ahead=True, first_calls=True, providers=("torch",))
    results = run.run(chosen, asked, said.append)
    assert said[2] == "inputs, answers and kernels"
    spent = results.run["ahead"]
    assert list(spent) == ["inputs_s", "kernels_s", "tuning_s", "slow"]
    assert 0 <= spent["inputs_s"] + spent["kernels_s"] < results.run["seconds"] + 0.2
    assert [x[:2] for x in spent["slow"]] == [("torch", chosen[0].name), ("torch", chosen[2].name)]
    assert [row.status for row in results.rows] == ["ok", "refused", "ok"]
    firsts = [(x["provider"], x["op"]) for x in results.first_calls]
    assert firsts == [("torch", "decode"), ("torch", "rms_norm_gated")]


def test_a_run_with_a_helper_gives_the_same_rows(small, monkeypatch):
    """A third process compiles prefill, and sluice's own the rest."""
    begun = []
    inner = ahead.Worker
    monkeypatch.setattr(ahead, "Worker", lambda *a, **k: begun.append(inner(*a, **k)) or begun[-1])
    chosen = [small("prefill", "9"), small("decode", "N=1")]
    asked = options(isolate=True, ahead=True, providers=("sluice",))
    results = run.run(chosen, asked, lambda _: None)
    assert [row.status for row in results.rows] == ["ok", "ok"]
    (helper,) = begun
    assert helper.process.poll() is not None  # gone before the first row


def test_an_oracle_short_of_memory_is_asked_again_when_its_turn_comes(small, monkeypatch):
    chosen = [small("decode", "N=1"), small("decode", "N=2"), small("decode", "N=3")]
    sources = ahead.Sources(chosen, options(isolate=True))
    inner = ahead.Answer.of

    def short(workload, inputs, dtype):
        if workload is chosen[1]:
            raise torch.cuda.OutOfMemoryError("so many at once")
        return inner(workload, inputs, dtype)

    monkeypatch.setattr(ahead.Answer, "of", short)
    runners = {"sluice": Spy()}
    later = time.monotonic() + 60
    ahead.compile_all(chosen, runners, sources, options(isolate=True), later, lambda *_: None)
    assert [w.name for _, w in runners["sluice"].asked] == [chosen[0].name]
    monkeypatch.setattr(ahead.Answer, "of", inner)
    assert Path(sources.take(chosen[1])).exists()
    sources.close()


def test_no_time_left_means_nothing_ahead(small, monkeypatch):
    monkeypatch.setattr(ahead, "Worker", Spy)
    runners = {"sluice": Spy()}
    chosen = [small("decode", "N=1")]
    sources = ahead.Sources(chosen, options(isolate=True))
    ahead.compile_all(
        chosen, runners, sources, options(isolate=True), time.monotonic() - 1, lambda *_: None
    )
    assert not runners["sluice"].asked
    assert not sources.made
    sources.close()


def test_a_variant_shares_what_sluice_compiled():
    worker = Worker("sluice:separate", "cpu", 1, [], False, "/caches/of/sluice")
    try:
        assert worker.caches == "/caches/of/sluice"
        worker.send("start")
        assert worker.receive(60)["title"] == "sluice, separate calls"
    finally:
        worker.close()
