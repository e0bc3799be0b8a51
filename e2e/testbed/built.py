"""`e2e/images`: the project's own images for the node, built here and brought into it without a registry.

The base is a Debian made by mmdebstrap; operator and router are built from images/ on it, from a wheel of
this checkout; engines run the checkout's own environment, which host_folders.py mounts. An image is built
once for what goes into it: the archives lie in the cache under the digest of their inputs.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from testbed.bed import BedError, bed
from testbed.images import ImageStore
from testbed.packages import need_packages
from testbed.programs import CHECKOUT, E2E, catalogue, tools_folder

FILES = E2E / "testbed" / "containerfiles"
SUITE = "bookworm"
INCLUDED = ("python3", "python3-venv", "ca-certificates", "libgomp1", "libnuma1", "redis-server")
BASE = "localhost/kvist-e2e-base"
STAND_IN = "localhost/kvist-e2e-vllm"
# Older than what pip would choose: the engine image must leave them as they are.
PINS = ("numpy==2.2.6", "pydantic==2.11.7")
# Packages may come through a proxy with a certificate of its own; what the machine trusts, the build trusts.
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
PACKAGES = ("operator/kvist_operator", "router/kvist_router", "connector/kvist_connector", "cli/kvist_cli")


@dataclass(frozen=True)
class Recipe:
    """One image."""

    name: str
    containerfile: Path
    arguments: tuple[tuple[str, str], ...] = ()
    wheel: bool = False
    """Whether a wheel of this checkout and the requirements go into it."""

    stand_in: bool = False
    """Whether it is built on the stand-in for a vLLM image."""

    @property
    def reference(self) -> str:
        """Its name in the cluster."""
        return f"kvist.dev/{self.name}:e2e"

    def inputs(self) -> Iterable[Path]:
        """The files that decide what is in it."""
        yield self.containerfile
        if self.stand_in:
            yield FILES / "vllm"
        if self.wheel:
            yield CHECKOUT / "pyproject.toml"
            for folder in ("requirements", *PACKAGES):
                yield from sorted(path for path in (CHECKOUT / folder).rglob("*") if source(path))

    def archive(self) -> Path:
        """Where it lies once built."""
        seen = hashlib.sha256(repr((SUITE, INCLUDED, self.arguments)).encode())
        for path in self.inputs():
            seen.update(f"{path.relative_to(CHECKOUT)}\0".encode() + path.read_bytes())
        return tools_folder() / "images" / f"{self.name}-{seen.hexdigest()[:16]}.tar"


def source(path: Path) -> bool:
    """Whether a file of the checkout is part of what is installed."""
    return path.is_file() and "__pycache__" not in path.parts


def recipes() -> tuple[Recipe, ...]:
    """All images of the project."""
    base = (("BASE", BASE),)
    return (
        Recipe("operator", CHECKOUT / "images" / "Containerfile.operator", base, wheel=True),
        Recipe("router", CHECKOUT / "images" / "Containerfile.router", base, wheel=True),
        Recipe("engine", FILES / "engine", (*base, ("ENVIRONMENT", sys_prefix()))),
        Recipe("redis", FILES / "redis", base),
    )


def shipped_engine() -> Recipe:
    """The engine image as it is shipped, over a stand-in for vLLM's: what Kvist adds, without an engine."""
    arguments = (("VLLM_IMAGE", STAND_IN),)
    containerfile = CHECKOUT / "images" / "Containerfile.engine"
    return Recipe("shipped-engine", containerfile, arguments, wheel=True, stand_in=True)


def sys_prefix() -> str:
    """The checkout's environment, at the path where the engines' pods mount it too."""
    return str(CHECKOUT / ".venv")


def main() -> int:
    """The command line."""
    options = parser().parse_args()
    chosen = [recipe for recipe in recipes() if recipe.name in (options.names or [recipe.name])]
    try:
        need_packages("images")
        archives = {recipe.reference: build(recipe) for recipe in chosen}
        if not options.build_only:
            store = ImageStore(bed(), catalogue())
            for reference, archive in archives.items():
                store.load(archive)
                print(f"images: {reference} is in the cluster", flush=True)
    except BedError as error:
        print(f"images: {error}", file=sys.stderr)
        return 1
    return 0


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(prog="e2e/images", description=__doc__)
    made.add_argument("names", nargs="*", help="names of images; default: all")
    made.add_argument("--build-only", action="store_true", help="do not import them into the cluster")
    return made


def build(recipe: Recipe) -> Path:
    """The archive of an image, built unless it is in the cache. Older ones of its name are removed."""
    target = recipe.archive()
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    build_base()
    if recipe.stand_in:
        buildah("build", "--isolation=chroot", *trusted(), f"--build-arg=BASE={BASE}",
                f"--build-arg=PINS={' '.join(PINS)}", f"--file={FILES / 'vllm'}", f"--tag={STAND_IN}",
                str(FILES))  # fmt: skip
    print(f"images: building {recipe.reference}", flush=True)
    half = target.with_suffix(".partial")
    half.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="kvist-image-") as folder:
        if recipe.wheel:
            fill_context(Path(folder))
        arguments = [word for name, value in recipe.arguments for word in ("--build-arg", f"{name}={value}")]
        buildah(
            "build", "--isolation=chroot", *trusted(), *arguments,
            f"--file={recipe.containerfile}", f"--tag={recipe.reference}", folder,
        )  # fmt: skip
        buildah("push", recipe.reference, f"oci-archive:{half}:{recipe.reference}")
    for old in target.parent.glob(f"{recipe.name}-*.tar"):
        old.unlink()
    half.replace(target)
    return target


def trusted() -> list[str]:
    """The machine's certificates for the steps of a build; they do not become part of the image."""
    return [f"--volume={CERTIFICATES}:{CERTIFICATES}:ro"] if CERTIFICATES.exists() else []


def fill_context(folder: Path) -> None:
    """What a Containerfile may copy: a wheel in dist/ and the locked requirements."""
    shutil.copytree(CHECKOUT / "requirements", folder / "requirements")
    run([f"{sys_prefix()}/bin/python", "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder / "dist")],
        CHECKOUT)  # fmt: skip


def build_base() -> None:
    """Debian with what the images share, from the machine's own package sources."""
    folder = tools_folder() / f"base-{SUITE}-{hashlib.sha256(repr(INCLUDED).encode()).hexdigest()[:8]}"
    rootfs = folder / "rootfs.tar"
    if not rootfs.exists():
        print(f"images: Debian {SUITE} with {', '.join(INCLUDED)}", flush=True)
        folder.mkdir(parents=True, exist_ok=True)
        half = folder / "partial.tar"
        run(["mmdebstrap", "--mode=root", "--variant=minbase", f"--include={','.join(INCLUDED)}", SUITE,
             str(half), *package_sources()])  # fmt: skip
        half.replace(rootfs)
    elif BASE in buildah("images", "--format={{.Name}}").split():
        return
    buildah("build", f"--file={FILES / 'base'}", f"--tag={BASE}", str(folder))


def package_sources() -> list[str]:
    """The machine's own Debian sources."""
    known = [Path("/etc/apt/sources.list.d/debian.sources"), Path("/etc/apt/sources.list")]
    found = [str(path) for path in known if path.exists()][:1]
    if not found:
        raise BedError(
            f"this machine has none of {', '.join(map(str, known))}: images need Debian's packages"
        )
    return found


def buildah(*arguments: str) -> str:
    """buildah with a store of its own in the cache."""
    store = tools_folder() / "buildah"
    return run(
        ["buildah", f"--root={store}/root", f"--runroot={store}/run", "--storage-driver=vfs", *arguments]
    )


def run(command: list[str], folder: Path | None = None) -> str:
    """Run it; BedError with the end of what it said."""
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=1800, check=False, env={**os.environ}
    )
    if done.returncode:
        said = (done.stdout + done.stderr).strip().splitlines()[-20:]
        raise BedError(f"{' '.join(command[:6])} ...:\n" + "\n".join(said))
    return done.stdout
