"""versions.toml is the one place of a version, and the pinned modules follow it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from testbed.programs import catalogue

CATALOGUE = catalogue()
RESOLVED = [source for source in CATALOGUE.sources.values() if not source.local]


def test_groups_name_every_program_once() -> None:
    grouped = [program for programs in CATALOGUE.groups.values() for program in programs]
    known = [program for source in CATALOGUE.sources.values() for program in source.programs]
    assert sorted(grouped) == sorted(known)


@pytest.mark.parametrize("source", RESOLVED, ids=lambda source: source.name)
def test_the_pinned_module_is_of_the_version(source) -> None:
    text = (source.folder / "go.mod").read_text()
    assert re.search(
        rf"^(require)?\s+{re.escape(source.module)} v{re.escape(source.version)}\s", text, re.MULTILINE
    )
    assert {source.package(program) for program in source.programs} <= set(text.split())


@pytest.mark.parametrize("source", RESOLVED, ids=lambda source: source.name)
def test_every_module_that_is_built_has_a_checksum(source) -> None:
    sums = (source.folder / "go.sum").read_text()
    assert f"{source.module} v{source.version} h1:" in sums


def test_binaries_are_kept_by_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVIST_TOOLS", str(tmp_path))
    version = CATALOGUE.sources["etcd"].version
    assert CATALOGUE.path("etcd") == tmp_path / f"etcd-{version}" / "etcd"


def test_an_unknown_program_is_refused_with_the_known_ones() -> None:
    with pytest.raises(KeyError, match=r"etcdd.*kubectl"):
        CATALOGUE.path("etcdd")


def test_the_node_needs_what_the_api_needs() -> None:
    assert set(CATALOGUE.wanted("api")) < set(CATALOGUE.wanted("node")) == set(CATALOGUE.wanted("all"))
