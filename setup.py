"""What ``pyproject.toml`` cannot say: the README as a package index shows it, and the addresses.

An index shows the README alone, so links to files of the repository need its address. It is given
when a release is built: ``make wheel REPOSITORY=https://...``. Without it such links become plain
text, and the metadata has no addresses.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?://|#)([^)\s]+)\)")
PICTURE = re.compile(r"<picture>.*?</picture>\n*", re.DOTALL)


def readme(text: str, repository: str) -> str:
    """The README with absolute links, or without links where the repository has no address."""
    if not repository:
        text = PICTURE.sub("", text)
        return LINK.sub(lambda found: "" if found[1] else found[2], text)
    files, raw = f"{repository}/blob/main/", f"{repository}/raw/main/"
    text = re.sub(r'(srcset|src)="(?!https?://)([^"]+)"', rf'\1="{raw}\2"', text)
    return LINK.sub(lambda found: f"{found[1]}[{found[2]}]({files}{found[3]})", text)


def urls(repository: str) -> dict[str, str]:
    """Where a user finds what belongs to the package."""
    if not repository:
        return {}
    return {
        "Repository": repository,
        "Documentation": f"{repository}/tree/main/docs",
        "Changelog": f"{repository}/blob/main/CHANGELOG.md",
        "Issues": f"{repository}/issues",
    }


if __name__ == "__main__":
    address = os.environ.get("SLUICE_REPOSITORY", "").rstrip("/")
    setup(
        long_description=readme((HERE / "README.md").read_text(encoding="utf-8"), address),
        long_description_content_type="text/markdown",
        project_urls=urls(address),
    )
