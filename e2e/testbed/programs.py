"""The programs of the test bed: versions.toml read, and where each binary lies once built."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

E2E = Path(__file__).resolve().parent.parent
CHECKOUT = E2E.parent
GROUPS = ("api", "node")


@dataclass(frozen=True)
class Source:
    """One Go module of versions.toml."""

    name: str
    version: str
    module: str
    programs: Mapping[str, str] = field(default_factory=dict)
    """Name of the binary -> package within the module. None: only files of the module are read."""

    tags: str = ""
    ldflags: str = ""
    staging: tuple[str, ...] = ()
    """Modules under k8s.io/ that Kubernetes requires as v0.0.0."""

    local: bool = False
    """Its source is in its folder, so there is nothing to resolve."""

    @property
    def folder(self) -> Path:
        """Its go.mod and go.sum."""
        return E2E / "tools" / self.name

    def package(self, program: str) -> str:
        """The import path of a program."""
        inside = self.programs[program]
        return self.module if inside == "." else f"{self.module}/{inside}"

    def linker(self) -> str:
        """The linker's flags: no symbols, and the version where the program wants it stamped."""
        major, minor, _ = self.version.split(".")
        return f"-s -w {self.ldflags.format(version=self.version, major=major, minor=minor)}".strip()


@dataclass(frozen=True)
class Catalogue:
    """All sources, and what each group of tests needs."""

    sources: dict[str, Source]
    groups: dict[str, tuple[str, ...]]

    def source_of(self, program: str) -> Source:
        """The module that holds a program. KeyError with the known names otherwise."""
        for source in self.sources.values():
            if program in source.programs:
                return source
        known = ", ".join(sorted(name for source in self.sources.values() for name in source.programs))
        raise KeyError(f"program {program!r} is not in versions.toml; it has {known}")

    def path(self, program: str) -> Path:
        """Where the binary lies, built or not."""
        source = self.source_of(program)
        return tools_folder() / f"{source.name}-{source.version}" / program

    def wanted(self, group: str) -> list[str]:
        """The programs of a group; `node` includes `api`, `all` is everything."""
        last = GROUPS.index("node" if group == "all" else group)
        return [program for name in GROUPS[: last + 1] for program in self.groups[name]]


def catalogue() -> Catalogue:
    """versions.toml."""
    read = tomllib.loads((E2E / "versions.toml").read_text())
    groups = {name: tuple(programs) for name, programs in read.pop("groups").items()}
    return Catalogue({name: source(name, table) for name, table in read.items()}, groups)


def source(name: str, table: dict[str, Any]) -> Source:
    """One table of versions.toml. TypeError for a key it does not know."""
    return Source(name=name, **{**table, "staging": tuple(table.get("staging", ()))})


def tools_folder() -> Path:
    """The cache of binaries outside the checkout: $KVIST_TOOLS, or kvist/tools in the user's cache."""
    chosen = os.environ.get("KVIST_TOOLS")
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(chosen) if chosen else Path(base) / "kvist" / "tools"
