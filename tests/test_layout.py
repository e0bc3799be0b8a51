"""The tree keeps the layout that the tools rely on."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DEPLOYABLES = {
    "operator": "kvist_operator",
    "router": "kvist_router",
    "connector": "kvist_connector",
    "cli": "kvist_cli",
}
LOCKS = sorted((ROOT / "requirements").glob("*.txt"))


def committed() -> list[Path]:
    """Every committed file that is there."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True)
    return [path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()]


@pytest.mark.parametrize("folder", DEPLOYABLES)
def test_a_deployables_folder_is_no_package_and_holds_no_loose_module(folder: str) -> None:
    # operator/__init__.py would shadow the standard library's `operator` in every child process.
    assert [path.name for path in (ROOT / folder).glob("*.py")] == []
    assert (ROOT / folder / DEPLOYABLES[folder] / "__init__.py").is_file()


def test_tests_are_no_packages() -> None:
    assert [str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("__init__.py")] == []


@pytest.mark.parametrize("package", DEPLOYABLES.values())
def test_every_folder_of_a_package_is_a_package(package: str) -> None:
    base = next(ROOT.glob(f"*/{package}"))
    folders = {path.parent for path in base.rglob("*.py")}
    assert [
        str(folder.relative_to(ROOT)) for folder in folders if not (folder / "__init__.py").is_file()
    ] == []


def test_entry_points_are_short() -> None:
    entries = [path for folder in DEPLOYABLES for path in (ROOT / folder).rglob("__main__.py")]
    long = {
        str(path.relative_to(ROOT)): n for path in entries if (n := len(path.read_text().splitlines())) > 30
    }
    assert long == {}


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.name)
def test_a_lock_pins_every_package_with_hashes_and_names_no_address(lock: Path) -> None:
    text = lock.read_text()
    assert "://" not in text
    pins = re.split(r"\n(?=\S)", text.strip())
    assert [pin.splitlines()[0] for pin in pins if "==" not in pin or "--hash=sha256:" not in pin] == []


def test_the_development_lock_holds_every_dependency_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    wanted = [*project["project"]["dependencies"], *project["dependency-groups"]["dev"]]
    wanted += [requirement for name, listed in extras.items() if name != "engine" for requirement in listed]
    names = {normal(re.split(r"[<>=!~\[; ]", requirement)[0]) for requirement in wanted}
    locked = {
        normal(name)
        for name in re.findall(r"^([\w.-]+)==", (ROOT / "requirements/dev-cpu.txt").read_text(), re.M)
    }
    assert names - locked == set(), "run `make lock`"


def test_no_committed_file_is_a_uv_lock() -> None:
    # uv.lock names index hosts; the hashed requirements are the locks here.
    assert [path for path in committed() if path.name == "uv.lock"] == []


def test_local_links_of_the_documents_lead_somewhere() -> None:
    pages = [path for path in committed() if path.suffix == ".md"]
    broken = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in pages
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
        if "://" not in target and not (page.parent / target).exists()
    ]
    assert broken == []


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
