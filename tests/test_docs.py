"""The documentation: its Python runs, its links lead somewhere, its chart is up to date."""

from __future__ import annotations

import importlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import sluice

ROOT = Path(__file__).parents[1]
DOCS = sorted(ROOT.glob("docs/**/*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *DOCS]
# guides whose Python runs, block after block: as it stands, or with a model that it speaks of
RUN = ("start", "state-pool", "prefix-caching", "speculative-decoding", "dtypes", "compat")
WITH_A_MODEL = ("transformers", "serving", "training")
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FENCE = re.compile(r"^```.*?^```[ \t]*$|^~~~.*?^~~~[ \t]*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[(?:[^\[\]]|\[[^\]]*\])*\]\((?![a-z]+://|mailto:)([^)\s#]*)(#[^)\s]*)?\)")


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks(path: Path) -> list[str]:
    return BLOCK.findall(path.read_text(encoding="utf-8"))


def a_model(folder: Path) -> dict:
    """Names that guides use for a model of the reader's own."""
    pytest.importorskip("transformers")
    from tests.models import stock_model

    model = stock_model("qwen3_5", layers=2, layer_types=["full_attention", "linear_attention"])
    model.save_pretrained(folder / "model")
    linear = [x for x in model.model.layers if hasattr(x, "linear_attn")]
    names = {"directory": folder / "model", "ids": torch.tensor([[5, 6, 7]]), "model": model}
    kinds = {"slots": 4, "dtype": torch.float32, "device": "cpu"}
    return {"sluice": sluice, "linear_layers": linear, **names, **kinds}


@pytest.mark.parametrize(
    "guide", [*RUN, *WITH_A_MODEL, pytest.param("onnx", marks=pytest.mark.slow)]
)
def test_the_python_of_a_guide_runs(guide, tmp_path, monkeypatch):
    pytest.importorskip("safetensors")
    if guide == "onnx":
        pytest.importorskip("onnxscript")
        pytest.importorskip("onnxruntime")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names: dict = {"__name__": guide} | (a_model(tmp_path) if guide not in RUN else {})
    found = blocks(ROOT / "docs" / f"{guide}.md")
    assert found
    with sluice.use_backend("reference"):  # nothing is compiled
        for i, code in enumerate(found):
            exec(compile(code, f"{guide}.md, block {i + 1}", "exec"), names)


def test_the_python_of_the_readme_runs():
    names: dict = {}
    with sluice.use_backend("reference"):
        for code in blocks(ROOT / "README.md"):
            exec(code, names)
    assert names["o"].shape == (2, 1, 16, 128)


@pytest.mark.slow
def test_the_python_of_the_guide_for_several_devices_runs_on_two_ranks(tmp_path):
    """Under torchrun, as the guide says; then the layer is compared with one device."""
    check = """
expected = net(x)[:, mine]
assert torch.allclose(y, expected, atol=1e-5), (y - expected).abs().max()
assert weights["A_log"].numel() == 8 and layer.A_log.numel() == 4
assert (moved is not None) == (ranks.rank == 0)
print("rank", ranks.rank, "is right", flush=True)
dist.destroy_process_group()
"""
    code = blocks(ROOT / "docs" / "distributed.md")
    begin = (
        "import torch, sluice\ntorch.manual_seed(0)\nsluice.use_backend('reference').__enter__()\n"
    )
    program = tmp_path / "guide.py"
    program.write_text("\n".join([begin, *code, check]), encoding="utf-8")
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = subprocess.run(
        [sys.executable, *launcher, str(program)],
        capture_output=True, text=True, check=False, timeout=120, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("is right") == 2


@pytest.mark.parametrize("path", DOCS, ids=_name)
def test_all_python_of_a_page_is_python(path):
    """Also of pages that are no guides: what is not a signature is at least valid."""
    for code in blocks(path):
        if "…" not in code and " -> (" not in code and ") -> y" not in code:
            compile(code, _name(path), "exec")


def _anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    found: set[str] = set()
    for line in FENCE.sub("", path.read_text(encoding="utf-8")).splitlines():
        if heading := re.match(r"#+ +(.*)", line):
            text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading[1])
            slug = re.sub(r"[^\w\- ]", "", text.lower()).strip().replace(" ", "-")
            found.add(slug)
    return found


@pytest.mark.parametrize("path", PAGES, ids=_name)
def test_every_link_leads_somewhere(path):
    text = path.read_text(encoding="utf-8")
    pictures = re.findall(r'(?:src|srcset)="(?!https?:)([^"#]+)', text)
    broken = [name for name in pictures if not (path.parent / name).is_file()]
    for found in LINK.finditer(FENCE.sub("", text)):
        target = (path.parent / found[1]).resolve() if found[1] else path
        if not target.exists() or (
            found[2] and target.suffix == ".md" and found[2][1:] not in _anchors(target)
        ):
            broken.append(found[0])
    assert not broken


def test_every_page_is_in_the_sites_navigation():
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("nav:")[1]
    listed = set(re.findall(r"(\S+\.md)$", nav, re.MULTILINE))
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in DOCS} - {"README.md"}
    elsewhere = {"contributing.md", "changelog.md", "measuring.md", "security.md"}
    assert listed == pages | elsewhere


def test_every_public_name_is_in_the_reference():
    text = "".join(path.read_text(encoding="utf-8") for path in ROOT.glob("docs/reference/*.md"))
    shown = set(re.findall(r"^::: sluice\.(\w+)$", text, re.MULTILINE))
    shown |= {"accelerate", "restore"}  # with the rest of their module
    assert set(sluice.__all__) - shown == {"__version__"}


OPEN = ("layers", "distributed", "compat.fla", "compat.causal_conv1d", "compat.flashinfer",
        "integrations.onnx")  # fmt: skip


@pytest.mark.parametrize("module", OPEN)
def test_every_public_name_of_a_module_is_in_the_reference(module):
    text = "".join(path.read_text(encoding="utf-8") for path in ROOT.glob("docs/reference/*.md"))
    found = importlib.import_module(f"sluice.{module}")
    public = set(found.__all__)
    blocks = re.findall(rf"^::: sluice\.{module}\n(?: +options: (.*)\n)?", text, re.MULTILINE)
    whole = [options for options in blocks if "members:" not in options]
    shown = {
        name
        for options in blocks
        for names in re.findall(r"members: \[(.*?)\]", options)
        for name in names.split(", ")
    }
    shown |= set(re.findall(rf"^::: sluice\.{module}\.(?:\w+\.)*(\w+)$", text, re.MULTILINE))
    same = {n for n in public & set(sluice.__all__) if getattr(sluice, n) is getattr(found, n)}
    shown |= {n for n in same if f"::: sluice.{n}\n" in text}
    # a module shows all that it lists, except a function named like the file it is in
    missing = public - shown
    if whole:
        files = {path.stem for path in ROOT.glob(f"src/sluice/{module.replace('.', '/')}/*.py")}
        missing &= files
    assert not missing


def _tool(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_chart_is_that_of_the_committed_results():
    for path, text in _tool("charts").charts().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run `make bench-docs`"


def test_the_chart_has_a_bar_for_a_loss():
    charts = _tool("charts")
    bar = charts.Bar("decode", 0.5, "2 s, peer 1 s")
    text = charts.draw([charts.Group("a machine", "torch 2.11.0, 2026-11-15", [bar])], "light")
    assert charts.COLOURS["light"]["loss"] in text
    assert ">0.5x<" in text
    assert ">torch 2.11.0, 2026-11-15<" in text
    assert charts._times(0.9974) == "0.997x"
    assert charts._times(1 / 5523) == "1/5,523 "


def test_the_site_fetches_nothing_and_its_search_finds_the_contract_first():
    pytest.importorskip("mkdocs")
    hooks = _tool("site_hooks")
    page = SimpleNamespace(url="kernels/cpu.html", meta={}, file=SimpleNamespace(src_uri=""))
    made = hooks.on_post_page(f'<script src="{hooks.FETCHED}">', page)
    assert made == '<script src="../img/worker.js">'
    assert (ROOT / "docs" / hooks.WORKER).is_file()
    with pytest.raises(Exception, match="no longer loads"):
        hooks.on_post_page("<script>", page)
    weights = {}
    for name in ("contract.md", "reference/state.md", "vllm.md", "kernels/conv_log.md"):
        page.meta, page.file.src_uri = {}, name
        hooks.on_page_markdown("", page)
        weights[name] = page.meta.get("search", {}).get("boost", 1.0)
    assert list(weights) == sorted(weights, key=lambda name: -weights[name])


def test_docstrings_are_shown_without_signs_for_terminals():
    pytest.importorskip("griffe")
    docstrings = _tool("docstrings")
    text = docstrings.LITERAL.sub(docstrings._opening, "Rows::\n\n    y = x\n\n::\n\n    z\n")
    assert "::" not in text
    shown = docstrings.EXAMPLE.search("text\n\n>>> f(1)\n[1, 2]\n>>> g()\n3\n\nmore")
    assert shown[0] == ">>> f(1)\n[1, 2]\n>>> g()\n3\n"
    assert docstrings.ROLE.sub(r"`\1`", "see :func:`prefill`") == "see `prefill`"
