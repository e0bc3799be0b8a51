"""Links of the pages lead to files and headings that are there; the README has all pages of docs/."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (ROOT, ROOT / "docs", ROOT / "images", ROOT / "examples", ROOT / "charts" / "kvist")
PAGES = sorted(page for folder in FOLDERS for page in folder.glob("*.md"))
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """Headings as forges name them: lower case, blanks as hyphens, no other marks."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken(page: Path) -> Iterator[str]:
    for link in LINK.findall(page.read_text()):
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        if "://" not in link and (not target.exists() or (anchor and anchor not in anchors(target))):
            yield link


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    assert list(broken(page)) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "a.md"
    page.write_text("# One `x`\n[a](#one-x) [b](#two) [c](b.md) [d](https://example.com/#e) [f](.)\n")
    assert list(broken(page)) == ["#two", "b.md"]


def test_every_example_is_listed() -> None:
    listed = LINK.findall((ROOT / "examples/README.md").read_text())
    files = [path.relative_to(ROOT / "examples").as_posix() for path in (ROOT / "examples").rglob("*.yaml")]
    assert [file for file in files if file not in listed] == []


def test_the_readme_names_every_page() -> None:
    readme = (ROOT / "README.md").read_text()
    pages = [page.relative_to(ROOT).as_posix() for page in (ROOT / "docs").glob("*.md")]
    assert [page for page in pages if f"]({page})" not in readme] == []
