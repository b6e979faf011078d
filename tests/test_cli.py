"""The commands: what they print, what they refuse, and that the demo notices wrong results."""

from __future__ import annotations

import builtins
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import sluice
from sluice import cli

SMALL = [
    "--batch",
    "2",
    "--prompt-length",
    "20",
    "--tokens",
    "3",
    "--rounds",
    "1",
    "--model",
    "qwen3.5-0.8b",
]


@pytest.fixture
def small_demo(monkeypatch):
    """The demo's module with even smaller models; heads stay 16 of 128."""
    pytest.importorskip("transformers")
    from sluice import demo

    monkeypatch.setattr(demo, "HIDDEN", 64)
    monkeypatch.setattr(demo, "VOCABULARY", 128)
    return demo


@pytest.fixture
def without(monkeypatch):
    """Make packages look as if they were not installed."""

    def hide(*packages):
        real = builtins.__import__

        def find(name, *args, **kwargs):
            if name.split(".")[0] in packages:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
            return real(name, *args, **kwargs)

        monkeypatch.setattr(builtins, "__import__", find)

    return hide


def refused(capsys, *argv):
    """The message of a command that ends with status 2 and without a traceback."""
    try:
        code = cli.main(list(argv))
    except SystemExit as exit_:  # argparse's own
        code = exit_.code
    out, err = capsys.readouterr()
    assert code == 2, out + err
    assert "Traceback" not in err
    assert not out
    return err


def test_version_and_help_as_a_program():
    python = [sys.executable, "-m", "sluice.cli"]
    done = subprocess.run([*python, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"sluice {sluice.__version__}"
    done = subprocess.run(python, capture_output=True, text=True, check=True)
    assert "demo" in done.stdout
    assert "doctor" in done.stdout


def test_doctor_prints_the_report(capsys):
    assert cli.main(["doctor", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    for expected in ("torch", "reference", "Qwen3.5-27B", "rms_norm_gated"):
        assert expected in out


@pytest.mark.parametrize("preset", ["qwen3.5-0.8b", "Qwen3-Next-80B-A3B", "Qwen3.8-Flash-Next"])
def test_demo_agrees_prints_times_and_writes_them(small_demo, capsys, tmp_path, preset):
    file = tmp_path / "numbers.json"
    assert cli.main(["demo", *SMALL[:-1], preset, "--json", str(file)]) == 0
    out, err = capsys.readouterr()
    assert "Outputs agree" in out
    assert "8 of 8 greedy tokens equal" in out
    assert "prefill, 2 x 20 tokens" in out
    assert "made small: 4 of" in out
    assert "In bfloat16 (logits within" in out
    assert "Traceback" not in err
    numbers = json.loads(file.read_text())
    assert numbers["agree"] is True
    assert numbers["error"] < 1e-4
    assert numbers["bfloat16"]["agree"] is True
    parts = {f"{phase}{part}" for phase in ("prefill", "decode") for part in ("", "_gdn", "_ops")}
    assert set(numbers["seconds"]) == parts
    for phase in ("prefill", "decode"):
        for kind in ("transformers", "sluice"):
            names = (phase, f"{phase}_gdn", f"{phase}_ops")
            whole, layers, operators = (numbers["median_ms"][name][kind] for name in names)
            assert 0 < operators < layers < whole


@pytest.mark.parametrize("fault", ["a state that is not kept", "outputs two percent too large"])
def test_demo_notices_a_wrong_result_and_does_not_time_it_row_33(
    small_demo, monkeypatch, capsys, tmp_path, fault
):
    from sluice.integrations import transformers as integration

    right = integration.mix

    def wrong(layer, shape, x, rows, mask=None):
        if fault.startswith("outputs"):
            return right(layer, shape, x, rows, mask) * 1.02
        return right(layer, shape, x, rows._replace(state=rows.state.clone()), mask)

    monkeypatch.setattr(integration, "mix", wrong)
    file = tmp_path / "numbers.json"
    assert cli.main(["demo", *SMALL, "--json", str(file)]) == 1
    out = capsys.readouterr().out
    assert "Outputs DISAGREE" in out
    assert " ms" not in out
    assert json.loads(file.read_text())["seconds"] == {}


def test_demo_leaves_nothing_behind(small_demo):
    options = small_demo.Options(model="qwen3.5-0.8b")
    model, _, _ = small_demo.build(options)
    file = sys.modules[type(model).__module__]
    before = file.torch_chunk_gated_delta_rule
    for kind in small_demo.KINDS:
        with small_demo.running(model, kind):
            pass
    assert file.torch_chunk_gated_delta_rule is before
    assert not any("forward" in layer.__dict__ for layer in small_demo.known_layers(model))


def test_demo_loads_a_checkpoint_directory(small_demo, capsys, tmp_path):
    from tests.models import stock_model

    stock_model("qwen3_5").save_pretrained(tmp_path / "model")
    args = ["--model", str(tmp_path / "model"), "--prompt-length", "9", "--tokens", "2"]
    assert cli.main(["demo", *args, "--rounds", "1", "--dtype", "bfloat16"]) == 0
    out = capsys.readouterr().out
    assert "4 layers (3 linear)" in out
    assert "near ties" in out


def test_demo_works_without_rich(small_demo, without, capsys):
    without("rich")
    assert cli.main(["demo", *SMALL]) == 0
    err = capsys.readouterr().err
    assert "[1/5] building the model" in err
    assert "[5/5] round 1 of 1: sluice" in err


def test_demo_without_transformers_names_the_extra(without, capsys):
    without("transformers")
    assert 'pip install "sluice-gdn[transformers]"' in refused(capsys, "demo")


def test_mistakes_are_answered_with_what_was_expected(capsys, tmp_path):
    pytest.importorskip("transformers")
    cases = {
        ("demo", "--model", "qwen3.5-35b"): "did you mean 'Qwen3.5-35B-A3B'?",
        ("demo", "--model", "llama"): "a known model (one of Qwen3-Next-80B-A3B",
        ("demo", "--tokens", "0"): "expected a number of at least 1, got '0'",
        ("demo", "--layers", "3"): "expected at least 4 layers",
        ("demo", "--device", "banana"): "--device: expected cpu, cuda or cuda:1, got 'banana'",
        ("demo", "--model", str(tmp_path)): "expected a directory with config.json",
        ("warmup", "--model", "qwen3.5-35b"): "did you mean 'Qwen3.5-35B-A3B'?",
        ("warmup", "--model", str(tmp_path)): "expected a directory with config.json",
        ("demo", "--dtype", "int8"): "invalid choice: 'int8'",
        ("dmeo",): "invalid choice: 'dmeo'",
        ("demo", "--threads", "2"): "sluice demo: error: unrecognized arguments: --threads 2",
        ("doctor", "now"): "sluice doctor: error: unrecognized arguments: now",
        ("--fast",): "sluice: error: unrecognized arguments: --fast",
        ("demo", "--json", str(tmp_path)): "--json: expected a file, got the directory",
        ("doctor", "--device", "mps"): "--device: expected cpu, cuda or cuda:1",
    }
    if not torch.cuda.is_available():
        cases["demo", "--device", "cuda"] = "expected cpu: torch sees no CUDA device, got 'cuda'"
    for argv, message in cases.items():
        assert message in refused(capsys, *argv), argv
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 8}')
    assert "model_type: expected one of qwen3_next" in refused(
        capsys, "demo", "--model", str(tmp_path)
    )
    for text in ("{", '{"model_type": "qwen3_5_text"}'):  # damaged, and without weights
        (tmp_path / "config.json").write_text(text)
        assert "--model: cannot load" in refused(capsys, "demo", "--model", str(tmp_path))


def test_a_json_file_that_cannot_be_written_is_refused_before_anything_runs(capsys, tmp_path):
    message = refused(capsys, "demo", "--json", str(tmp_path / "no" / "such.json"))
    assert "--json: expected a file in a directory that exists" in message


def test_an_interrupt_while_the_library_is_imported_is_no_traceback(tmp_path):
    """The program is outside the package, whose import takes seconds."""
    (tmp_path / "torch.py").write_text("raise KeyboardInterrupt")
    where = str(Path(sluice.__file__).parents[1])
    code = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {where!r}]\n"
    code += "import sluice_command; sys.exit(sluice_command.main())"
    done = subprocess.run(
        [sys.executable, "-c", code, "doctor"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (130, "sluice: interrupted\n")


def test_an_interrupt_that_an_imported_module_catches_still_ends_the_program(tmp_path):
    """Half imported, it would go on with packages that seem to be broken."""
    (tmp_path / "torch.py").write_text(
        "import os, signal\n"
        "try:\n    os.kill(os.getpid(), signal.SIGINT)\nexcept BaseException:\n    pass\n"
    )
    where = str(Path(sluice.__file__).parents[1])
    # a shell starts its background jobs with interrupts ignored, and children inherit that
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {where!r}]\n"
    code += "import sluice_command; sys.exit(sluice_command.main())"
    done = subprocess.run(
        [sys.executable, "-c", code, "doctor"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (130, "sluice: interrupted\n")


def test_a_reader_that_goes_away_is_no_traceback():
    """As in ``sluice doctor | head -1``."""
    code = "import sluice_command, sluice.cli, sys\n"
    code += "sluice.cli.main = lambda: print('x' * 200_000) or 0\n"
    code += "sys.exit(sluice_command.main())"
    program = [sys.executable, "-c", code]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        running.stdout.close()
        said = running.stderr.read().decode()
        status = running.wait()
    assert (status, said) == (141, "")


def test_the_demo_says_that_the_machine_was_busy(small_demo, monkeypatch, capsys):
    for share, said in ((0.02, False), (0.5, True)):
        monkeypatch.setattr(small_demo.Neighbours, "share", lambda self, share=share: share)
        assert cli.main(["demo", *SMALL]) == 0
        assert ("BUSY: other programs took 50%" in capsys.readouterr().out) == said


@pytest.mark.parametrize("command", ["demo", "bench", "warmup", "export"])
def test_every_command_calls_a_model_the_same(command, capsys):
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    assert "--model " in capsys.readouterr().out


def test_warmup_takes_a_checkpoint_directory(tmp_path):
    about = {"model_type": "qwen3_5_text", "hidden_size": 64, "num_hidden_layers": 4}
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32}
    widths = {"linear_value_head_dim": 32, "linear_conv_kernel_dim": 4, "hidden_act": "silu"}
    (tmp_path / "config.json").write_text(json.dumps({**about, **heads, **widths}))
    shape = cli._shape(str(tmp_path), 2)
    assert (shape.num_k_heads, shape.num_v_heads) == (1, 2)
    assert cli._shape("Qwen3.5-4B", 2) == "Qwen3.5-4B"


def test_warmup_compiles_the_kinds_it_was_asked_for(monkeypatch, capsys):
    asked = []

    def run(todo, device, *more):
        asked.extend(form.spec(device) for form in todo if " step " in form.name)
        return [("step", "cpu")]

    monkeypatch.setattr(importlib.import_module("sluice.warmup"), "run", run)
    kinds = {"gate": "float16", "state": "bfloat16", "slots": "int32"}
    options = [x for name, kind in kinds.items() for x in (f"--{name}-dtype", kind)]
    given = ["--device", "cpu", "--dtype", "float32", "--state-layout", "kv", "--tp", "4"]
    assert cli.main(["warmup", *given, *options]) == 0
    for s in asked:
        assert (s.state_layout, s.HV, s.dtype) == ("kv", 8, torch.float32)
        assert (s.A_log.dtype, s.state.dtype) == (torch.float16, torch.bfloat16)
    assert {s.slots.dtype for s in asked if s.slots is not None} == {torch.int32}


def test_an_interrupt_is_no_traceback(monkeypatch, capsys):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(sluice, "doctor", interrupt)
    assert cli.main(["doctor"]) == 130
    assert "interrupted" in capsys.readouterr().err
