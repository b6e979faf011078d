"""The page: complete in itself, and drawn without an error in a real browser, in both colours."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
from pathlib import Path

import pytest
from tests.bench.sample import sample

from sluice.bench import html
from sluice.bench.results import Row

CHARTS = ("glance", "scaling", "roofline", "heat", "cold")
ARTIFACTS = Path(__file__).parents[2] / "artifacts"  # ignored by git
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--enable-logging=stderr", "--virtual-time-budget=5000",
)  # fmt: skip


@pytest.fixture
def chromium(tmp_path):
    """Run the browser on a page with an empty profile; returns its stdout and stderr."""
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        pytest.skip("no chromium is installed")

    def browse(page, *flags):
        command = [program, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", *flags]
        done = subprocess.run(
            [*command, page.as_uri()], capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return done

    return browse


@pytest.fixture
def page(tmp_path):
    path = tmp_path / "page.html"
    path.write_text(html.page(sample()), encoding="utf-8")
    return path


def console(done):
    """Lines that the page itself caused."""
    return [x for x in done.stderr.splitlines() if "CONSOLE" in x]


def test_the_page_asks_for_nothing_else(page):
    text = page.read_text(encoding="utf-8")
    assert not re.findall(r"(?:src|href)\s*=\s*[\"'](?!data:)", text)
    assert not re.findall(r"@import|url\(|fetch\(|XMLHttpRequest", text)
    assert set(re.findall(r"https?://[^\s\"'`]+", text)) == {"http://www.w3.org/2000/svg"}
    assert "prefers-color-scheme: dark" in text
    assert 'name="viewport"' in text


def test_the_table_is_there_without_a_script(page):
    text = page.read_text(encoding="utf-8").split("<script")[0]
    assert text.count("<tr") > len(sample().workloads)
    assert "wrong: o: relative error 3.00e-02 &gt; 1.00e-02" in text
    assert "pip install it" in text
    assert '<th class="n">host µs</th><th class="n">eager µs</th>' in text


def test_every_row_of_the_table_is_as_wide_as_its_head(page):
    text = page.read_text(encoding="utf-8").split("<script")[0]
    head, *rows = re.findall(r"<tr.*?</tr>", text)
    wide = head.count("<th")
    for row in rows:
        spans = [int(x) - 1 for x in re.findall(r'colspan="(\d+)"', row)]
        assert row.count("<td") + sum(spans) == wide, row


def test_ways_to_call_sluice_that_there_is_no_need_for_are_no_news(tmp_path):
    results = sample()
    first = results.workloads[0]["name"]
    for name in ("sluice:triton", "fla"):
        results.rows.append(Row(first, name, "refused", f"because of {name}"))
    text = html.page(results).split("<script")[0]
    assert "because of fla" in text
    assert "because of sluice:triton" not in text


def test_rows_of_one_operator_can_be_looked_at(page, chromium):
    probe = """<script>
      const shown = () => [...document.querySelectorAll("tr[data-op]")].filter((x) => !x.hidden);
      const all = shown().length;
      const buttons = [...document.querySelectorAll("#pick-rows button")];
      buttons.find((x) => x.innerText === "decode").click();
      const kinds = new Set(shown().map((x) => x.dataset.op));
      document.title = `${all} then ${shown().length} of ${[...kinds]}`;
    </script></body>"""
    text = page.read_text(encoding="utf-8")
    page.write_text(text.replace("</body>", probe), encoding="utf-8")
    done = chromium(page, "--dump-dom")
    assert console(done) == []
    found = re.search(r"<title>(\d+) then (\d+) of (\w+)</title>", done.stdout)
    assert found
    assert int(found[1]) > int(found[2]) > 10
    assert found[3] == "decode"


def probed(page, chromium, script, *flags):
    """The title that a script gives the page."""
    text = page.read_text(encoding="utf-8")
    page.write_text(text.replace("</body>", f"<script>{script}</script></body>"), encoding="utf-8")
    done = chromium(page, "--dump-dom", *flags)
    assert console(done) == []
    return re.search(r"<title>(.*?)</title>", done.stdout)[1]


def test_rows_are_sorted_by_a_number_and_put_back(page, chromium):
    script = """
      const head = [...document.querySelectorAll("th button")].find((x) => x.innerText === "µs");
      const rows = (kind) => [...document.querySelectorAll("tbody tr" + kind)];
      const times = () => rows("[data-us]").map((x) => +x.dataset.us);
      const order = () => rows("").map((x) => x.innerText).join();
      const before = order();
      const after = (up, x, y) => (up ? x >= y : x <= y);
      const sorted = (up) => times().every((x, n, all) => !n || after(up, x, all[n - 1]));
      const found = [];
      for (const up of [true, false]) { head.click(); found.push(sorted(up)); }
      head.click();
      document.title = [...found, order() === before].join(" ");
    """
    assert probed(page, chromium, script) == "true true true"


def test_one_provider_is_looked_at_beside_sluice(page, chromium):
    script = """
      const pick = document.getElementById("pick-who");
      pick.value = "fla";
      pick.dispatchEvent(new Event("change"));
      const shown = [...document.querySelectorAll("tr[data-provider]")].filter((x) => !x.hidden);
      document.title = [...new Set(shown.map((x) => x.dataset.provider))].sort().join(" ");
    """
    assert probed(page, chromium, script) == "fla sluice"


def test_the_address_shows_one_operator_alone(page, chromium):
    script = """
      location.hash = "decode";
      setTimeout(() => {
        const lines = document.querySelectorAll("#glance svg > text:not([pointer-events])");
        const names = [...lines].map((x) => x.textContent);
        document.title = [names.includes("decode"), names.includes("prefill")].join(" ");
      }, 200);
    """
    assert probed(page, chromium, script) == "true false"


def test_a_loss_is_seen_although_the_mean_is_a_win():
    """In the script: the smallest ratio decides the border, and is written below the mean."""
    script = html._asset("charts.js")
    assert 'if (found.low < 1) box.classList.add("losing")' in script
    assert ".losing { stroke: var(--bad)" in html._asset("page.css")


def test_a_busy_run_has_a_banner():
    results = sample()
    assert 'class="banner"' not in html.page(results).split("<script")[0]
    results.machine["others"] = 0.48
    text = html.page(results).split("<script")[0]
    assert '<p class="banner" role="alert">' in text
    assert "other programs took 48% of the cores" in text


def test_the_page_says_in_words_what_it_shows(page):
    text = page.read_text(encoding="utf-8").split("<script")[0]
    assert "Every operator of sluice beside " in text
    assert "agreed with the float64 oracle" in text


def test_a_narrow_screen_shows_every_number_with_its_name(page, chromium):
    script = """
      const cell = document.querySelector("td[data-name='µs']");
      const box = cell.getBoundingClientRect();
      const name = getComputedStyle(cell, "::before").content;
      document.title = [box.right <= innerWidth, box.width > 20, name].join(" ");
    """
    shown = probed(page, chromium, script, "--window-size=500,900")
    assert shown.replace("&quot;", '"') == 'true true "µs"'


def test_text_of_others_cannot_end_the_script():
    results = sample()
    results.rows[0].status = "error"
    results.rows[0].reason = "</script><script>alert(1)</script>"
    text = html.page(results)
    assert "<script>alert" not in text
    assert text.count("</script>") == 2


def test_every_chart_is_drawn_and_the_console_stays_silent(page, chromium):
    done = chromium(page, "--dump-dom", "--window-size=1200,900")
    assert console(done) == []
    assert 'data-ready="yes"' in done.stdout
    assert "data-error" not in done.stdout
    for name in CHARTS:
        found = re.search(rf'<div id="{name}"[^>]*data-marks="(\d+)"[^>]*><svg', done.stdout)
        assert found, f"{name} is not drawn"
        assert int(found[1]) > 2, name
    # providers as lines, one circle for each point
    assert done.stdout.count("<circle") > 100
    assert done.stdout.count("<option") > 4
    # the first calls were measured; otherwise their section would be hidden
    assert not re.search(r'<section aria-labelledby="h-cold" hidden', done.stdout)


def test_results_with_nothing_in_them_make_a_page_too(tmp_path, chromium):
    results = sample()
    results.rows, results.first_calls = [], []
    path = tmp_path / "empty.html"
    path.write_text(html.page(results), encoding="utf-8")
    done = chromium(path, "--dump-dom")
    assert console(done) == []
    assert done.stdout.count('<p class="empty">') == len(CHARTS)
    assert re.search(r'<section aria-labelledby="h-cold" hidden', done.stdout)


@pytest.mark.parametrize(
    ("name", "width", "height", "flags"),
    [
        ("desktop-light", 1200, 2400, ()),
        ("desktop-dark", 1200, 2400, ("--blink-settings=preferredColorScheme=0",)),
        ("phone-dark", 500, 2600, ("--blink-settings=preferredColorScheme=0",)),
    ],
)
def test_a_screenshot_is_kept(name, width, height, flags, page, chromium):
    ARTIFACTS.mkdir(exist_ok=True)
    picture = ARTIFACTS / f"bench-{name}.png"
    picture.unlink(missing_ok=True)
    chromium(page, f"--screenshot={picture}", f"--window-size={width},{height}", *flags)
    header = picture.read_bytes()[:24]
    assert header.startswith(b"\x89PNG")
    assert struct.unpack(">II", header[16:24]) == (width, height)
    assert picture.stat().st_size > 40_000  # more than a blank page


def test_a_phone_shows_the_page_without_scrolling_sideways(page, chromium):
    """The charts fit their boxes; only tables scroll."""
    text = page.read_text(encoding="utf-8")
    probe = (
        "<script>document.title = 'wide ' + document.documentElement.scrollWidth + ' of '"
        " + document.documentElement.clientWidth</script></body>"
    )
    page.write_text(text.replace("</body>", probe), encoding="utf-8")
    done = chromium(page, "--dump-dom", "--window-size=500,900")
    wide, of = map(int, re.search(r"<title>wide (\d+) of (\d+)", done.stdout).groups())
    assert wide <= of
