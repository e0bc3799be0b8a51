"""docs/reference.md is what the code says now, and the other pages name things that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer

from kvist_cli.app import app
from kvist_connector import names
from tools import reference

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_reference_is_current() -> None:
    assert reference.PAGE.read_text() == reference.page(), "run `make reference`"


@pytest.mark.parametrize(
    "part", ["`8080`", "`x-kvist-replica`", "`kvist_router_ttft_seconds`", "`kvist demo`"]
)
def test_the_reference_covers_each_kind_of_name(part: str) -> None:
    assert part in reference.page()


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_commands_in_a_page_exist(page: Path) -> None:
    known = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    named = set(re.findall(r"^kvist ([a-z]+)", page.read_text(), re.M))
    named |= set(re.findall(r"`kvist ([a-z]+)", page.read_text()))
    assert named - known == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_make_targets_in_a_page_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"(?:`|^)make ([a-z0-9-]+)", page.read_text(), re.M)) - targets == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_kvist_headers_in_a_page_exist(page: Path) -> None:
    known = {value for key, value in vars(names).items() if key.startswith("HEADER_")}
    assert set(re.findall(r"`(x-kvist-[a-z-]+[a-z])`", page.read_text())) - known == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_files_named_in_a_page_exist(page: Path) -> None:
    named = re.findall(
        r"`((?:connector|router|operator|cli|tests|bench|docs|examples|crds)/[\w./-]+)`", page.read_text()
    )
    named += re.findall(r"-f (examples/[\w.-]+)", page.read_text())
    assert [path for path in named if "NAME" not in path and not (ROOT / path).exists()] == []
