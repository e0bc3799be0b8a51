"""A keeper that is killed: its processes end whatever they do, and the next start removes its folder."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import psutil
import pytest

from kvist_connector.errors import ConfigError
from kvist_connector.settings import validate
from kvist_router.processes.folder import PREFIX, SOCKET, remove_leftovers, socket_folder
from kvist_router.processes.keeper import keeping
from kvist_router.settings import RouterSettings
from kvist_router.testing.engine import FakeEngine
from kvist_router.testing.process import family, router

SECONDS = 60


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files, here and in processes that are started."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def folders(base: Path) -> list[Path]:
    return list(base.glob(f"{PREFIX}*"))


@pytest.mark.timeout(600)  # two routers of four processes each start
async def test_children_end_with_it_though_one_is_stopped_and_its_folder_goes_at_the_next_start(
    temporary: Path,
) -> None:
    async with FakeEngine() as engine:
        flags = ("--relays", "2", "--replica", engine.url)
        async with router(*flags) as (keeper, _):
            children = family(keeper)[1:]
            assert len(children) == 3
            children[0].suspend()  # it can notice nothing by itself
            keeper.send_signal(signal.SIGKILL)
            gone, left = await asyncio.to_thread(psutil.wait_procs, children, SECONDS)
            assert (len(gone), left) == (3, [])
        (before,) = folders(temporary)
        async with router(*flags):
            assert not before.exists()
            (now,) = folders(temporary)
            with socket_folder():  # of another router on this machine
                assert (now / SOCKET).exists()
        assert folders(temporary) == []


def test_only_folders_that_a_killed_keeper_left_are_removed(temporary: Path) -> None:
    made = [temporary / f"{PREFIX}{name}" for name in ("left", "being-made", "with-more", "link")]
    for folder in made[:3]:
        folder.mkdir()
    (made[0] / SOCKET).touch()
    (made[2] / SOCKET).touch()
    (made[2] / "more").touch()
    elsewhere = temporary / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / SOCKET).touch()
    made[3].symlink_to(elsewhere)
    (temporary / f"{PREFIX}file").touch()
    remove_leftovers(temporary)
    assert [folder.exists() for folder in made] == [False, True, True, True]
    assert ((made[2] / "more").exists(), (elsewhere / SOCKET).exists()) == (True, True)


async def test_a_path_that_is_too_long_for_a_socket_is_refused_in_words(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = temporary / ("x" * 100)
    os.mkdir(long)
    monkeypatch.setattr("tempfile.tempdir", str(long))
    settings = validate(
        RouterSettings, {"port": 0, "admin_port": 0, "replicas": [{"url": "http://127.0.0.1:9"}]}
    )
    with pytest.raises(ConfigError, match="set TMPDIR to a short path"):
        async with keeping(settings, 1):
            raise AssertionError("it started")
