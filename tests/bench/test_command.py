"""The command ``sluice bench``: what it runs, what it writes, and its answer to a typo."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

import pytest
import torch
from tests.bench.sample import sample

from sluice import cli
from sluice.bench import command, floors
from sluice.bench import session as sessions

TINY = ["--model", "qwen3.5-27b", "--tp", "16", "--rounds", "2", "--seconds", "0.01"]
TINY += ["--threads", "1", "--no-first-call", "--device", "cpu"]


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(sessions, "MOST_SETS", 2)
    monkeypatch.setitem(floors.SIZES, "cpu", (1 << 16, 1 << 18))
    monkeypatch.setitem(floors.MATRIX, "cpu", 64)


def bench(*arguments):
    return cli.main(["bench", *arguments])


def test_a_run_prints_a_table_and_writes_every_report(tmp_path, capsys):
    files = [tmp_path / "deep" / f"r.{kind}" for kind in ("json", "csv", "html")]
    outputs = [x for f in files for x in (f"--{f.suffix[1:]}", str(f))]
    chosen = ["decode", "--batch", "1,2", "--peers", "torch"]
    assert bench(*chosen, *TINY, "--note", "a remark", *outputs) == 0
    out, err = capsys.readouterr()
    assert "decode, Qwen3.5-27B, TP 16 (heads 1/3, float32)" in out
    assert "1 of" in out
    assert "decode/Qwen3.5-27B/tp16/N=2" in err
    kept = json.loads(files[0].read_text())
    assert {r["provider"] for r in kept["rows"]} == {"sluice", "torch"}
    assert all(r["status"] == "ok" and r["samples"] >= 20 for r in kept["rows"])
    assert kept["run"]["note"] == "a remark"
    assert "N=2" in files[1].read_text()
    assert "<svg" not in files[2].read_text().split("<script")[0]  # charts are drawn by the page
    assert "a remark" in files[2].read_text()


def test_backends_of_sluice_are_rows_of_their_own(capsys):
    chosen = ["decode", "--batch", "1", "--peers", "none", "--backends", "reference"]
    assert bench(*chosen, *TINY) == 0
    assert "sluice:reference (reference)" in capsys.readouterr().out


@pytest.mark.parametrize("narrow", [[], ["decode"], ["--peers", "none"]])
def test_the_whole_surface_on_a_gpu_has_sluice_in_other_ways(narrow, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    peers = [] if "none" in narrow else ["--peers", "fla"]
    assert bench("--device", "cuda", *narrow, *peers, "--list") == 0
    last = capsys.readouterr().out.splitlines()[-1]
    whole = "providers: sluice, sluice:separate, sluice:invariant, sluice:triton, fla"
    expected = {0: whole, 1: "providers: sluice, fla", 2: "providers: sluice"}
    assert last == expected[len(narrow)]


def test_only_a_gpu_has_eager_times_beside_others_and_few_seconds_of_them(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())

    def seconds(*arguments):
        _, options = command._prepare(parser.parse_args(["bench", "decode", *arguments]))
        return options.eager_seconds

    assert seconds("--device", "cpu") == 0.0
    assert 0.05 <= seconds("--device", "cuda") <= 0.15
    assert 0.05 <= seconds("--device", "cuda", "--quick") <= 0.15


def test_results_can_be_shown_again(tmp_path, capsys):
    sample().save(tmp_path / "a.json")
    arguments = ["--show", str(tmp_path / "a.json"), "--html", str(tmp_path / "a.html")]
    assert bench(*arguments) == 0
    assert "FlashInfer" in (tmp_path / "a.html").read_text()
    assert "Qwen3.5-397B-A17B, TP 8" in capsys.readouterr().out


def test_a_wrong_row_of_sluice_fails_the_command(tmp_path, capsys):
    results = sample()
    results.rows[0].status, results.rows[0].reason = "wrong", "o: relative error 1"
    results.save(tmp_path / "a.json")
    assert bench("--show", str(tmp_path / "a.json")) == 1
    assert "wrong: o: relative error 1" in capsys.readouterr().err


def test_the_list_is_what_would_run(capsys):
    asked = ["prefill", "--model", "qwen3.5-27b", "--tp", "2", "--lengths", "8192,4x2048"]
    assert bench(*asked, "--peers", "fla,flashqla,flashinfer", "--list") == 0
    assert capsys.readouterr().out.splitlines() == [
        "prefill/Qwen3.5-27B/tp2/8192",
        "prefill/Qwen3.5-27B/tp2/4x2048",
        "providers: sluice, fla, flashqla, flashinfer",
    ]


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        (["prefil"], "did you mean 'prefill'?"),
        (["--peers", "flashinfr"], "did you mean 'flashinfer'?"),
        (["--model", "qwen3.5-27"], "bench: --model: expected a known model (did you mean "),
        (["--dtype", "float23"], "did you mean 'float32'?"),
        (["--backends", "referense"], "did you mean 'reference'?"),
        (["--lengths", "81o2"], "--lengths: expected a length such as 8192, 4x2048"),
        (["--batch", "x"], "--batch: expected a number of sequences, got 'x'"),
        (["--batch", "4x8"], "--batch: expected a number of sequences, got '4x8'"),
        (["--tp", "two"], "--tp: expected a number"),
        (["--tp", "5"], "expected a divisor of 16 key heads"),
        (["decode", "--lengths", "64"], "--lengths is for prefill"),
        (["--device", "tpu"], "--device: expected cpu, cuda or cuda:1"),
        (["--peer-path", "fla"], "--peer-path: expected NAME=DIR"),
        (["--peer-path", "fla=/no/such/place"], "--peer-path: expected a directory"),
        (["--rounds", "0"], "--rounds: expected at least 1, got 0"),
        (["--threads", "0"], "--threads: expected 1 to "),
        (["--threads", "99999"], "got 99999"),
        (["--seconds", "-1"], "--seconds: expected more than 0 seconds, got -1"),
        (["--time-limit", "0"], "--time-limit: expected more than 0"),
        (["--backends", "nope"], "'nope' is no backend (one of hopper, triton, cpu, chunked"),
        (["--compare", "none.json", "none.json"], "none.json: No such file"),
        (["--show", "none.json"], "none.json: No such file"),
        (["--update-docs", "a.md"], "expected results (.json) and documents (.md)"),
        (
            ["--compare", "a.json", "b.json", "--threshold", "-3"],
            "--threshold: expected at least 0",
        ),
        (["--json", "."], "--json: expected a file, got the directory"),
    ],
)
def test_a_mistake_is_answered_with_what_was_meant(arguments, answer, capsys):
    assert bench(*arguments) == 2
    out, err = capsys.readouterr()
    assert answer in err
    assert "Traceback" not in err
    assert not out


def test_bench_as_a_program():
    done = subprocess.run(
        [sys.executable, "-m", "sluice.cli", "bench", "--help"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "--lengths 8192,4x2048" in done.stdout
