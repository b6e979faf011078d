"""Results as data: saved, loaded, written as CSV, compared, and quoted in documents."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from pathlib import Path

import pytest
from tests.bench.sample import sample

from sluice import cli
from sluice.bench import compare, docs, html, table
from sluice.bench.results import Results, Row, microseconds, percentile, rate
from sluice.contract.errors import SluiceError

ROOT = Path(__file__).parents[2]


def test_results_are_the_same_after_they_were_kept(tmp_path):
    before = sample()
    before.save(tmp_path / "a.json")
    after = Results.load(tmp_path / "a.json")
    assert after.to_json() == json.loads((tmp_path / "a.json").read_text())
    assert after.row(before.rows[0].workload, "sluice").median_s == before.rows[0].median_s
    assert after.measured_floors().bandwidth == before.measured_floors().bandwidth


def test_results_of_an_earlier_version_have_no_time_of_checks(tmp_path):
    before = sample()
    before.rows[0].check_s = 12.5
    before.save(tmp_path / "a.json")
    assert Results.load(tmp_path / "a.json").rows[0].check_s == 12.5
    data = json.loads((tmp_path / "a.json").read_text())
    for row in data["rows"]:
        del row["check_s"]
    (tmp_path / "b.json").write_text(json.dumps(data))
    after = Results.load(tmp_path / "b.json")
    assert after.rows[0].check_s is None
    assert after.rows[0].median_s == before.rows[0].median_s


def test_results_of_an_earlier_version_have_no_eager_calls(tmp_path, capsys):
    """They are loaded and shown, in the columns that they have."""
    sample(eager=False).save(tmp_path / "a.json")
    data = json.loads((tmp_path / "a.json").read_text())
    for row in data["rows"]:
        del row["host"], row["eager"]
    (tmp_path / "b.json").write_text(json.dumps(data))
    after = Results.load(tmp_path / "b.json")
    assert not after.has_eager
    table.show(after)
    assert "eager" not in capsys.readouterr().out
    assert "eager" not in html.page(after).split("<script")[0]
    assert {x["eager_us"] for x in csv.DictReader(io.StringIO(after.to_csv()))} == {""}


def test_times_of_eager_calls_are_the_same_after_they_were_kept(tmp_path):
    before = sample()
    before.save(tmp_path / "a.json")
    row = Results.load(tmp_path / "a.json").rows[0]
    assert row.host == before.rows[0].host
    assert row.eager == before.rows[0].eager
    assert (row.host.p10_s, row.host.samples) == (pytest.approx(1.84e-5), 3)


@pytest.mark.parametrize("text", ["{}", "[]", "nonsense", '{"schema": 99}'])
def test_a_file_that_is_something_else_is_refused(text, tmp_path):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(SluiceError, match=r"a\.json"):
        Results.load(tmp_path / "a.json")


def test_csv_has_a_line_for_each_row():
    results = sample()
    lines = list(csv.DictReader(io.StringIO(results.to_csv())))
    assert len(lines) == len(results.rows)
    first = lines[0]
    assert first["provider"] == "sluice"
    assert float(first["median_us"]) == pytest.approx(results.rows[0].median_s * 1e6, rel=1e-4)
    assert float(first["gflop_per_s"]) > 0
    assert float(first["host_us"]) == 20.0
    assert float(first["eager_us"]) == pytest.approx(float(first["median_us"]) + 20, abs=1e-3)
    wrong = next(x for x in lines if x["status"] == "wrong")
    assert wrong["median_us"] == ""
    assert "relative error" in wrong["reason"]


def test_medians_and_percentiles():
    row = Row("w", "p", "ok")
    row.set_samples([5.0, 1.0, 3.0, 2.0, 4.0])
    assert (row.median_s, row.p10_s, row.p90_s, row.samples) == (3.0, 1.4, 4.6, 5)
    assert row.spread == pytest.approx(1 / 3)
    assert percentile([7.0], 0.9) == 7.0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(2.867e-6, "2.87"), (36.34e-6, "36.3"), (1.934e-3, "1,934"), (99.96e-6, "100"), (None, "-")],
)
def test_three_digits_are_shown(seconds, text):
    assert microseconds(seconds) == text


def test_rates_have_the_unit_of_what_limits_the_operator():
    assert rate({"unit": "bytes", "bytes": 8e6, "flops": 1}, 2e-6) == "4.00 TB/s"
    assert rate({"unit": "flops", "bytes": 1, "flops": 5e8}, 1e-3) == "500 GFLOP/s"


# ------------------------------------------------------------------------------------ the terminal


def test_the_table_says_what_failed_and_never_gives_it_a_time(capsys):
    table.show(sample())
    out = capsys.readouterr().out
    assert "WRONG" in out
    assert "x faster" in out
    assert "x slower" in out
    assert "missing: causal-conv1d: ModuleNotFoundError (pip install it)" in out
    assert "SM clock 1980 MHz" in out
    assert "not timed for fla: pool rows gathered" in out
    assert "first call, fresh process, flashqla: 1.5 s to import, 92.00 s" in out
    for line in out.splitlines():
        if "WRONG" in line:
            assert "graph" not in line


def test_eager_times_stand_beside_those_of_a_graph():
    results = sample()
    names = table.head(results)
    assert names[2:6] == ("µs", "p10-p90", "host µs", "eager µs")
    for workload, rows in table.lines(results).items():
        assert all(len(row) == len(names) for row in rows), workload
        for row in rows:
            assert (row[4] == "") == (row[2] == "WRONG")
    ours = next(iter(table.lines(results).values()))[0]
    first = results.rows[0]
    assert dict(zip(names, ours, strict=True))["host µs"] in ("20.0", "40.0", "60.0", "80.0")
    assert microseconds(first.eager.median_s) == table.eager(first)[1]
    assert any("eager call returns after host µs" in line for line in table.footer(results))


def test_a_busy_machine_is_said(capsys):
    results = sample()
    results.machine["others"] = 0.04
    table.show(results)
    assert "BUSY" not in capsys.readouterr().out
    results.machine["others"] = 0.48
    table.show(results)
    assert "BUSY: other programs took 48% of the cores" in capsys.readouterr().out


def test_the_table_does_without_rich(capsys, monkeypatch):
    import builtins

    real = builtins.__import__

    def find(name, *args, **kwargs):
        if name.split(".")[0] == "rich":
            raise ModuleNotFoundError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", find)
    table.show(sample())
    out = capsys.readouterr().out
    assert "prefill, Qwen3.5-35B-A3B (heads 16/32, bfloat16, float32 state)" in out
    assert "sluice (triton)" in out


# --------------------------------------------------------------------------------------- comparing


@pytest.mark.parametrize("which", [0, 1])
def test_a_busy_run_compares_with_nothing(which, tmp_path, capsys):
    runs = [sample(), sample()]
    runs[which].machine["others"] = 0.4
    assert compared(tmp_path, *runs) == 2
    name = ("old", "new")[which]
    assert f"took 40% of the cores during the {name} run" in capsys.readouterr().out


def test_results_without_a_common_row_compare_with_nothing(tmp_path, capsys):
    other = sample()
    for row in other.rows:
        row.workload += "/other"
    assert compared(tmp_path, sample(), other) == 2
    out = capsys.readouterr().out
    assert "no row is in both: nothing was compared" in out
    assert "0 of 0" not in out


def test_what_is_above_the_floor_is_explained(capsys):
    results = sample()
    table.show(results)
    plain = capsys.readouterr().out
    results.rows[0].floor_s = 1.27 * results.rows[0].median_s
    table.show(results)
    assert "above 100%" in capsys.readouterr().out
    assert ("above 100%" in plain) == any((r.share or 0) > 1 for r in sample().rows)


def compared(tmp_path, before, after, *arguments):
    before.save(tmp_path / "a.json")
    after.save(tmp_path / "b.json")
    files = [str(tmp_path / name) for name in ("a.json", "b.json")]
    return cli.main(["bench", "--compare", *files, *arguments])


def test_the_same_results_are_the_same(tmp_path, capsys):
    assert compared(tmp_path, sample(), sample()) == 0
    assert "slower" not in capsys.readouterr().out


def test_what_got_slower_fails(tmp_path, capsys):
    assert compared(tmp_path, sample(), sample(scale=1.2)) == 1
    out = capsys.readouterr().out
    assert "20% slower" in out
    assert "rows of sluice are slower by more than 5%" in out
    assert "factor of 1.000" in out  # the peers did not change


def test_faster_is_shown_and_passes(tmp_path, capsys):
    assert compared(tmp_path, sample(), sample(scale=0.8)) == 0
    assert "25% faster" in capsys.readouterr().out


def test_the_threshold_is_what_was_asked_for(tmp_path):
    assert compared(tmp_path, sample(), sample(scale=1.2), "--threshold", "30") == 0
    assert compared(tmp_path, sample(), sample(scale=1.03)) == 0
    assert compared(tmp_path, sample(), sample(scale=1.03), "--threshold", "2") == 1


def test_noise_is_taken_into_account(tmp_path, capsys):
    noisy = sample(scale=1.2, spread=0.4)
    assert compared(tmp_path, sample(spread=0.4), noisy) == 0
    assert "or their noise" in capsys.readouterr().out


def test_a_peer_that_got_slower_does_not_fail_but_shows(tmp_path, capsys):
    after = sample()
    for row in after.rows:
        if row.ok and row.provider != "sluice":
            row.median_s *= 1.5
    assert compared(tmp_path, sample(), after) == 0
    out = capsys.readouterr().out
    assert "50% slower" in out
    assert "factor of 1.500" in out


def test_what_was_right_and_is_wrong_now_is_worst(tmp_path, capsys):
    after = sample()
    after.rows[0].status, after.rows[0].reason = "wrong", "o: relative error 1"
    assert compared(tmp_path, sample(), after) == 1
    assert "broken" in capsys.readouterr().out.splitlines()[2]


def test_other_conditions_are_said(capsys):
    after = sample()
    after.machine["name"] = "Another GPU"
    text, good = compare.report(sample(), after, 0.05)
    assert good
    assert "not the same conditions: Invented GPU" in text


def test_results_without_a_row_in_common_are_said():
    after = sample()
    after.rows = []
    before = sample()
    text, good = compare.report(before, after, 0.05)
    assert good is None
    assert "no row is in both" in text
    timed = sum(row.ok for row in before.rows)
    assert f"{timed} rows of the old results are not in the new ones" in text


# --------------------------------------------------------------------------------------- documents

DOCUMENT = """# Speed

<!-- bench: gpu decode peers=fla,flashinfer models=Qwen3.5-35B-A3B sizes=N=1,N=64 -->
old
<!-- /bench -->

Text that stays.
"""


def test_tables_are_made_between_the_comments_and_nothing_else_changes(tmp_path, capsys):
    sample().save(tmp_path / "gpu.json")
    document = tmp_path / "doc.md"
    document.write_text(DOCUMENT)
    files = [str(tmp_path / "gpu.json"), str(document)]
    assert cli.main(["bench", "--check-docs", *files]) == 1
    assert document.read_text() == DOCUMENT
    assert cli.main(["bench", "--update-docs", *files]) == 0
    text = document.read_text()
    assert "old" not in text
    assert text.endswith("Text that stays.\n")
    assert "| `decode` N=64, Qwen3.5-35B-A3B | 16/32 |" in text
    assert "| `decode` N=8," not in text
    assert "FLA, µs" in text
    assert "FlashQLA" not in text
    assert "Invented GPU" in text
    assert cli.main(["bench", "--check-docs", *files]) == 0
    assert "up to date" in capsys.readouterr().out


def test_a_document_that_asks_for_other_results_is_left_alone(tmp_path, capsys):
    sample().save(tmp_path / "cpu.json")
    (tmp_path / "doc.md").write_text(DOCUMENT)
    files = [str(tmp_path / "cpu.json"), str(tmp_path / "doc.md")]
    assert cli.main(["bench", "--update-docs", *files]) == 0
    assert (tmp_path / "doc.md").read_text() == DOCUMENT
    assert "asks for gpu.json" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("comment", "message"),
    [
        ("gpu dekode", "nothing in gpu matches"),
        ("gpu decode/raw", "nothing in gpu"),
        ("gpu columns=fla", "expected peers="),
        ("gpu times=graph", "expected times=eager"),
    ],
)
def test_a_comment_that_makes_no_sense_is_refused(comment, message):
    with pytest.raises(SluiceError, match=message):
        docs.rewrite(f"<!-- bench: {comment} -->\n<!-- /bench -->", {"gpu": sample()})


def rows_of(comment):
    """The first cells of the table for a comment."""
    lines = docs.table(sample(), docs.parse(comment)).splitlines()
    return [line.split(" | ")[0].strip("| ") for line in lines[2:] if line.startswith("| `")]


def test_an_operator_is_narrowed_by_variant_state_and_size():
    one = "models=Qwen3.5-35B-A3B"
    name = "Qwen3.5-35B-A3B"
    assert rows_of(f"gpu step/bfloat16:N=64 decode/float32:N=1,N=64 {one}") == [
        f"`step` N=64, {name}, bfloat16 state",
        f"`decode` N=1, {name}",
        f"`decode` N=64, {name}",
    ]
    both = rows_of(f"gpu decode:N=64 {one}")
    assert both == [f"`decode` N=64, {name}", f"`decode` N=64, {name}, bfloat16 state"]
    # a variant is shown only if asked for, and then alone
    assert not any("raw" in row for row in rows_of(f"gpu prefill {one}"))
    raw = rows_of(f"gpu prefill/raw {one}")
    assert len(raw) == 2
    assert all(row.endswith("raw gates and keys") for row in raw)
    # named twice, it is shown once, at its first place
    assert rows_of(f"gpu layer:8192 layer {one}") == [
        f"`layer` 8192, {name}",
        f"`layer` 2048, {name}",
    ]


def test_a_workload_that_was_not_run_has_no_line():
    results = sample()
    for row in results.of(results.workloads[0]["name"]):
        row.status, row.median_s = "skipped", None
    text = docs.table(results, docs.parse("gpu prefill models=Qwen3.5-35B-A3B"))
    assert "`prefill` 8192," not in text
    assert "`prefill` 2048," in text
    assert "not run" not in text  # only a part was selected
    whole = docs.table(results, docs.parse("gpu prefill layer"))
    count = sum(w["op"] in ("prefill", "layer") and not w["variant"] for w in results.workloads)
    assert f"Of {count} workloads 1 were not run: the time was spent." in whole
    assert "were not run" not in docs.table(results, docs.parse("gpu decode"))
    assert "not run" not in docs.table(results, docs.parse("gpu prefill:8192,2048 layer"))


def test_versions_are_named_of_peers_only():
    results = sample()
    own = {**results.provider("sluice"), "name": "sluice:triton", "title": "sluice, triton alone"}
    results.providers.insert(1, own)
    first = results.workloads[0]["name"]
    results.rows.append(dataclasses.replace(results.row(first, "sluice"), provider=own["name"]))
    text = docs.table(results, docs.parse("gpu prefill"))
    assert "| sluice, triton alone, µs |" in text
    assert "alone 1.0" not in text
    assert "FLA 1.0" in text


def test_a_peer_that_failed_is_named_wrong_in_the_table():
    text = docs.table(sample(), docs.parse("gpu prefill sizes=8x4096"))
    assert "| wrong |" in text


EAGER = "gpu prefill:8192,8x4096 decode:N=1 peers=flashinfer,fla models=Qwen3.5-35B-A3B times=eager"


def test_eager_calls_have_a_table_of_their_own():
    results = sample()
    results.row("decode/Qwen3.5-35B-A3B/tp1/N=1", "flashinfer").method = "events"
    head, _, *rows = docs.table(results, docs.parse(EAGER)).splitlines()
    titles = ("sluice", "FLA", "FlashInfer")
    columns = [f"{who} {time}, µs" for who in titles for time in ("host", "eager", "graph")]
    assert [x.strip() for x in head.split("|")[3:-1]] == columns
    shown = {x.split("|")[1].strip(): [y.strip() for y in x.split("|")[3:-1]] for x in rows[:4]}
    assert len(shown) == 4
    for workload in results.workloads:
        label = docs._label(workload)
        if label not in shown:
            continue
        ours = results.row(workload["name"], "sluice")
        for n, name in enumerate(("sluice", "fla", "flashinfer")):
            row, cells = results.row(workload["name"], name), shown[label][3 * n : 3 * n + 3]
            if not row.ok:
                assert cells == ["wrong", "", ""]
                continue
            ratio = table.times_faster(row.eager.median_s, ours.eager.median_s)
            note = "" if name == "sluice" else f" ({ratio})"
            how = "" if row.method == "graph" else " (events)"
            assert cells == [
                microseconds(row.host.median_s),
                microseconds(row.eager.median_s) + note,
                microseconds(row.median_s) + how,
            ]
    assert any("(events)" in cell for cells in shown.values() for cell in cells)
    assert ["wrong", "", ""] in [cells[3:6] for cells in shown.values()]


def test_results_without_eager_calls_say_so_in_a_document():
    text = docs.table(sample(eager=False), docs.parse(EAGER))
    assert text == "Not measured yet: `gpu.json` has no times of eager calls.\n"


def test_the_documents_are_made_from_the_committed_results():
    """The tables of docs/benchmarks.md are those of the committed results."""
    kept = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
    if not kept:
        pytest.skip("no results are committed")
    results = {path.stem: Results.load(path) for path in kept}
    for name in ("docs/benchmarks.md",):
        text = (ROOT / name).read_text(encoding="utf-8")
        new, _ = docs.rewrite(text, results)
        assert new == text, f"{name}: run `make bench-docs`"
