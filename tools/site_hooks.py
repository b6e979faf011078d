"""What mkdocs does not do by itself for this site.

Pages outside docs/ are added. A link to a file of the repository leads to a copy in the site, so
that the site needs no address of the repository; a link to a folder becomes plain text. ``help``
comments are replaced by what the commands print. The search works from disk, with a script of the
site where the theme would fetch one.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
PAGES = {
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "security.md": "SECURITY.md",
    "measuring.md": "benchmarks/README.md",
}
"""Pages of the site that lie elsewhere in the repository."""
LINK = re.compile(
    r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?![a-z]+://|#|mailto:)([^)\s#]*)(#[^)\s]*)?\)"
)
FENCE = re.compile(r"^(```.*?^```[ \t]*$)", re.MULTILINE | re.DOTALL)
FOUND_FIRST = {"contract.md": 8.0, "reference/": 4.0, "kernels/": 0.5}
"""How much a page counts in the search: what an operator promises before how it was made."""
FETCHED = "https://unpkg.com/iframe-worker/shim"
"""What the theme's offline search would load from elsewhere; ``WORKER`` does the same."""
WORKER = "img/worker.js"
HELP = re.compile(r"^<!-- help: ?(\w*) -->$", re.MULTILINE)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of ``PAGES``, and every file that some page links to."""
    for uri, source in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, uri, content=text))
    wanted = set()
    for file in files.documentation_pages():
        for part in FENCE.split(file.content_string)[::2]:
            for found in LINK.finditer(part):
                target = _target(file.src_uri, found[2])
                if found[2] and _is_copied(target):
                    wanted.add(target)
    for target in sorted(wanted):
        content = (ROOT / target).read_bytes()
        files.append(File.generated(config, _copy(target), content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links to where things are in the site; show the help of commands."""
    parts = FENCE.split(markdown)
    here = page.file.src_uri
    for start, weight in FOUND_FIRST.items():
        if here.startswith(start):
            page.meta["search"] = {"boost": weight}
    parts[::2] = [LINK.sub(lambda found: _link(here, found), part) for part in parts[::2]]
    # the theme has another word than GitHub for a picture on dark ground
    text = re.sub(r"#gh-(light|dark)-mode-only", r"#only-\1", "".join(parts))
    return HELP.sub(lambda found: _help(found[1]), text)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Load nothing from elsewhere."""
    if FETCHED not in output:
        raise PluginError(
            f"{page.url}: the theme no longer loads {FETCHED}; see tools/site_hooks.py"
        )
    here = posixpath.dirname(page.url) or "."
    return output.replace(FETCHED, posixpath.relpath(WORKER, here))


def on_post_template(output_content: str, **_: Any) -> str:
    """The same for the page of an address that does not exist, whose links begin at the root."""
    return output_content.replace(FETCHED, f"/{WORKER}")


def _link(here: str, found: re.Match[str]) -> str:
    text, path, anchor = found[1], found[2], found[3] or ""
    if not path:
        return found[0]
    target = _target(here, path)
    if not (ROOT / target).exists():
        raise PluginError(f"{here}: a link to {path}, which does not exist")
    if (ROOT / target).is_dir():
        return text
    uri = _uri(target)
    return f"[{text}]({posixpath.relpath(uri, posixpath.dirname(here) or '.')}{anchor})"


def _target(here: str, path: str) -> str:
    """The file of the repository that a page's link means."""
    source = PAGES.get(here, f"docs/{here}")
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), path))


def _uri(target: str) -> str:
    """Where a file of the repository is in the site."""
    for uri, source in PAGES.items():
        if source == target:
            return uri
    if target == "docs/README.md":
        return "index.md"
    return target.removeprefix("docs/") if target.startswith("docs/") else _copy(target)


def _is_copied(target: str) -> bool:
    inside = target.startswith("docs/") or target in PAGES.values()
    return not inside and (ROOT / target).is_file()


def _copy(target: str) -> str:
    """Text that a browser shows instead of saving it."""
    shown = (".html", ".json", ".txt", ".svg")
    return f"files/{target}" if target.endswith(shown) else f"files/{target}.txt"


def _help(command: str) -> str:
    from sluice import cli

    parser = cli._parser()
    if command:
        (actions,) = (x for x in parser._actions if hasattr(x, "choices") and x.choices)
        parser = actions.choices[command]
    parser.formatter_class = _wide(parser.formatter_class)
    return f"```text\n{parser.format_help()}```"


def _wide(formatter: Any) -> Any:
    return lambda prog: formatter(prog, width=100, max_help_position=34)
