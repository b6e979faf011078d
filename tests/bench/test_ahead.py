"""Before the first row: inputs, answers and kernels, made ahead and by all processes at once."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

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


def options(**changes):
    settings = {"providers": ("sluice", "torch"), "rounds": 1, "seconds": 0.01, "least": 2}
    return run.Options(**{**settings, "first_calls": False, "quick": True, **changes})


# ----------------------------------------------------------------------------- inputs and answers


def test_inputs_are_drawn_ahead_for_another_device(small, monkeypatch):
    """Drawn on the host, before their turn; the numbers are the same."""
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
    """The oracle takes them as heads of one prompt; its numbers stay the same."""
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


class Spy:
    """A worker that notes what it is asked and answers at once."""

    def __init__(self, *arguments, **options):
        self.arguments, self.options = arguments, options
        self.asked, self.closed, self.restarts, self.caches = [], False, 0, "shared"

    def send(self, method, *arguments):
        self.asked.append((method, *arguments[:1]))

    def receive(self, timeout):
        return 0.5, False

    def restart(self, graphs):
        self.restarts += 1

    def close(self):
        self.closed = True


def test_helpers_compile_the_prefills_of_further_heads(small, monkeypatch):
    helpers = []
    monkeypatch.setattr(
        ahead, "Worker", lambda *a, **k: helpers.append(Spy(*a, **k)) or helpers[-1]
    )
    chosen = [
        small("prefill", "9"),
        small("decode", "N=1", tp=8),
        small("prefill", "7", tp=8),
    ]
    runners = {name: Spy() for name in ("flashqla", "flashinfer", "sluice:separate", "torch")}
    crew = ahead.Crew(chosen, runners, options(isolate=True), time.monotonic() + 9)
    for workload in chosen:
        crew.send(workload, "file")
    (helper,) = helpers  # for the one whose kernels are found on disk, and for its further heads
    assert helper.arguments[0] == "flashqla"
    assert helper.options == {"caches": "shared"}
    assert helper.asked == [("prime", chosen[2])]
    assert runners["flashqla"].asked == [("prime", chosen[0]), ("prime", chosen[1])]
    assert [w for _, w in runners["flashinfer"].asked] == chosen
    assert [w for _, w in runners["sluice:separate"].asked] == chosen
    assert not runners["torch"].asked  # compiles nothing
    noted = []
    crew.wait(lambda name, workload, seconds: noted.append((name, workload.name)))
    assert len(noted) == 9
    crew.close()
    assert helper.closed


def test_who_tunes_has_everything_compiled_by_helpers_and_measures_alone_at_the_end(
    small, monkeypatch
):
    """A choice made while others use the device would be a bad one."""
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
    assert [who for who, _ in order[3:5]] == [("helper closed",)] * 2
    assert order[5:] == [(("runner",), name) for name in names]


def test_a_runner_that_breaks_while_it_compiles_begins_again(small):
    class Dies(Spy):
        def receive(self, timeout):
            raise WorkerError("gone")

    class Spoilt(Spy):
        def receive(self, timeout):
            return None, len(self.asked) == 2

    chosen = [small("decode", "N=1"), small("decode", "N=2")]
    runners = {"sluice:separate": Dies(), "flashqla": Spoilt(), "flashinfer": Spy()}
    crew = ahead.Crew(chosen, runners, options(isolate=True), time.monotonic() + 9)
    for workload in chosen:
        crew.send(workload, "file")
    crew.wait(lambda *_: None)
    assert [runners[name].restarts for name in runners] == [1, 1, 0]


def test_priming_runs_a_workload_once_and_judges_nothing(small):
    workload, refused = small("decode", "N=1"), small("prefill", "9")
    sources = ahead.Sources([workload, refused], options(isolate=True))
    session = sessions.Session("torch", "cpu", 1)
    later = time.monotonic() + 60
    seconds, fatal = session.prime(workload, torch.float32, sources.take(workload), later)
    assert seconds > 0
    assert not fatal
    assert session.prime(refused, torch.float32, sources.take(refused), later) == (None, False)
    # too late: nothing is begun, not even the file is read
    assert session.prime(workload, torch.float32, "none", time.monotonic() - 1) == (None, False)
    sources.close()


def test_a_run_with_everything_ahead_gives_the_same_rows(small, monkeypatch):
    monkeypatch.setattr(type(provider("torch")), "compiles", "process")
    chosen = [small("decode", "N=1"), small("prefill", "9"), small("rms_norm_gated", "5")]
    said = []
    asked = options(isolate=True, ahead=True, first_calls=True, providers=("torch",))
    results = run.run(chosen, asked, said.append)
    assert said[2] == "inputs, answers and kernels"
    assert [row.status for row in results.rows] == ["ok", "refused", "ok"]
    firsts = [(x["provider"], x["op"]) for x in results.first_calls]
    assert firsts == [("torch", "decode"), ("torch", "rms_norm_gated")]


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
