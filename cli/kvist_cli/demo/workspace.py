"""The demo's own folder on this machine: one demo at a time, always fresh, nothing left behind.

Called by entry.py. A demo that was killed is cleaned up by the next one: its programs are ended, its
arenas and files removed.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from kvist_cli import folders
from kvist_cli.local import Options, leftovers
from kvist_cli.local.events import OnEvent
from kvist_cli.local.state import RunFolder
from kvist_connector.errors import ConfigError, KvistError


@contextmanager
def workspace(
    environment: Mapping[str, str], on_event: OnEvent, on_kept: Callable[[Path], None]
) -> Iterator[Path]:
    """The empty folder; removed at the end, but kept where its logs may say what failed (`on_kept`)."""
    path = folders.state_folder(environment) / "demo"
    lock = RunFolder(path).lock()
    if lock is None:
        raise ConfigError(f"another kvist demo is running in '{path}'; wait for its end or stop it")
    try:
        _empty(path, on_event)
        yield path
    except KvistError:
        if any(path.glob("*/logs")):
            on_kept(path)
        raise
    except KeyboardInterrupt:
        _empty(path, on_event)
        raise
    else:
        _empty(path, on_event)
    finally:
        lock.release()


def _empty(path: Path, on_event: OnEvent) -> None:
    for folder in (child for child in path.iterdir() if child.is_dir()):
        run = RunFolder(folder)
        state = run.read()
        if state is not None:
            leftovers.end(state, run, Options(), flush=False, on_event=on_event)
        shutil.rmtree(folder)
