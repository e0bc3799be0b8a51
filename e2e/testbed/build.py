"""`e2e/build`: build the programs of the test bed into the cache, each once a version.

A binary appears under its name only when it is whole, so an interrupted build goes on where it stopped.
A lock lets two builds of one machine take turns.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from testbed.programs import GROUPS, Catalogue, Source, catalogue, tools_folder


def main() -> int:
    """The command line."""
    options = parser().parse_args()
    known = catalogue()
    if options.path:
        print(known.path(options.path))
        return 0
    if options.resolve:
        for source in known.sources.values():
            if not source.local:
                resolve(source)
        return 0
    wanted = options.programs or known.wanted(options.group)
    missing = [name for name in wanted if not known.path(name).is_file()]
    if not missing:
        print(f"build: everything is in {tools_folder()}")
        return 0
    if shutil.which("go") is None:
        print("build: `go` is not on PATH; install Go and run again", file=sys.stderr)
        return 1
    with turn():
        for number, program in enumerate(missing, 1):
            build(known, program, f"{number}/{len(missing)}")
    return 0


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(prog="e2e/build", description=__doc__)
    made.add_argument("programs", nargs="*", help="names of programs; default: all of the group")
    made.add_argument("--group", choices=[*GROUPS, "all"], default="all", help="api: what needs no pods")
    made.add_argument("--path", metavar="PROGRAM", help="print where a program lies, and end")
    made.add_argument("--resolve", action="store_true", help="write tools/*/go.mod anew from versions.toml")
    return made


def build(known: Catalogue, program: str, place: str) -> None:
    """One binary. It is built beside its place and renamed."""
    source, target = known.source_of(program), known.path(program)
    if target.is_file():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    half = target.with_name(f".{program}.{os.getpid()}.partial")
    print(f"build: {place} {program} {source.version} ...", flush=True)
    began = time.monotonic()
    command = ["go", "build", "-trimpath", "-ldflags", source.linker(), "-tags", source.tags, "-o", str(half)]
    try:
        subprocess.run([*command, source.package(program)], cwd=source.folder, env=environment(), check=True)
        half.replace(target)
    finally:
        half.unlink(missing_ok=True)
    print(f"build: {place} {program} {source.version} took {time.monotonic() - began:.0f} s", flush=True)


def environment() -> dict[str, str]:
    """Static binaries, exactly the pinned modules, two compilers at a time."""
    flags = os.environ.get("GOFLAGS", "")
    return {
        **os.environ,
        "CGO_ENABLED": "0",
        "GOFLAGS": f"{flags} -mod=readonly -buildvcs=false -p=2".strip(),
    }


@contextmanager
def turn() -> Iterator[None]:
    """One build of a machine at a time; the others wait and then find its binaries."""
    tools_folder().mkdir(parents=True, exist_ok=True)
    with (tools_folder() / ".build.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


def resolve(source: Source) -> None:
    """go.mod and go.sum of a source, from its version alone."""
    source.folder.mkdir(parents=True, exist_ok=True)
    for name in ("go.mod", "go.sum"):
        (source.folder / name).unlink(missing_ok=True)
    go(source.folder, "mod", "init", f"kvist.dev/e2e/{source.name}")
    if not source.programs:
        go(source.folder, "mod", "edit", f"-require={source.module}@v{source.version}")
        go(source.folder, "mod", "download", source.module)
        return
    staging = "0." + source.version.split(".", 1)[1]
    for name in source.staging:
        go(source.folder, "mod", "edit", f"-replace=k8s.io/{name}=k8s.io/{name}@v{staging}")
    go(
        source.folder,
        "get",
        "-tool",
        *(f"{source.package(name)}@v{source.version}" for name in source.programs),
    )


def go(folder: Path, *arguments: str) -> None:
    """The go command in a folder."""
    print(f"build: {folder.name}: go {' '.join(arguments)}", flush=True)
    subprocess.run(["go", *arguments], cwd=folder, check=True)
