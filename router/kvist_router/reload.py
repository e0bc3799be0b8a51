"""Settings that change while the router runs: its configuration file is read again when it changes.

Called by app.py. Deciding (`decide`) is apart from acting (`Reloader`). A file that cannot be used leaves all
settings as they are; what can only be set at the start is named in the log, and stays as it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvist_connector.errors import ConfigError
from kvist_connector.settings import field_names
from kvist_router.changes import stamp
from kvist_router.mind.supervise import Counted, background
from kvist_router.settings import LimitSettings, RouterSettings

LOOK_SECONDS = 1.0
LIVE_SECTIONS = ("admission", "auth", "log", "log_level", "policy", "tenants", "weights")
LIVE_LIMITS = (
    "body_bytes",
    "body_seconds",
    "continuations",
    "decide_seconds",
    "first_byte_seconds",
    "idle_seconds",
    "retry_ratio",
)
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Change:
    """What a new file means: the settings in force from now on, and names of what waits for a restart."""

    settings: RouterSettings
    changed: tuple[str, ...]
    waits: tuple[str, ...]


def decide(old: RouterSettings, new: RouterSettings) -> Change:
    """Compare. Pure."""
    bounds = {name: getattr(new.limits, name) for name in LIVE_LIMITS}
    limits: LimitSettings = old.limits.model_copy(update=bounds)
    tenant = old.tenant.model_copy(update={"others": new.tenant.others})
    live: dict[str, Any] = {name: getattr(new, name) for name in LIVE_SECTIONS}
    settings = old.model_copy(update={**live, "limits": limits, "tenant": tenant})
    return Change(settings, _different(old, settings), _different(settings, new))


def _different(one: RouterSettings, other: RouterSettings) -> tuple[str, ...]:
    return tuple(name for name, _ in field_names(RouterSettings) if _at(one, name) != _at(other, name))


def _at(settings: object, name: str) -> object:
    for part in name.split("."):
        settings = getattr(settings, part)
    return settings


@dataclass(frozen=True)
class ConfigFile:
    """`read` gives the settings as they would be at a start now; raises ConfigError."""

    path: Path
    read: Callable[[], RouterSettings]


class Reloader:
    """`use` may raise ConfigError, having changed nothing."""

    def __init__(
        self,
        file: ConfigFile,
        current: RouterSettings,
        use: Callable[[RouterSettings], Awaitable[None]],
    ) -> None:
        self._path, self._read = file.path, file.read
        self._current = current
        self._use = use
        self._stamp = stamp(file.path)
        self._asked = asyncio.Event()

    def now(self) -> None:
        """Read it again whether or not it has changed: on SIGHUP."""
        self._stamp = None
        self._asked.set()

    async def watch(self) -> None:
        """Follow the file, for ever."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    await self._asked.wait()
            self._asked.clear()
            await self.look()

    async def look(self) -> None:
        """Take new settings if the file has changed."""
        found = await asyncio.to_thread(stamp, self._path)
        if found is None or found == self._stamp:
            return
        self._stamp = found
        try:
            change = decide(self._current, await asyncio.to_thread(self._read))
            await self._use(change.settings)
        except ConfigError as error:
            _log.error("%s: not taken, all settings stay as they are: %s", self._path, error)
            return
        self._current = change.settings
        _log.info("%s: read again; changed: %s", self._path, ", ".join(change.changed) or "nothing")
        if change.waits:
            _log.warning("%s: these need a restart: %s", self._path, ", ".join(change.waits))


@asynccontextmanager
async def reloading(
    settings: RouterSettings,
    file: ConfigFile | None,
    use: Callable[[RouterSettings], Awaitable[None]],
    failures: Counted,
) -> AsyncIterator[Reloader | None]:
    """A reloader that follows the file, where there is one."""
    if file is None:
        yield None
        return
    reloader = Reloader(file, settings, use)
    async with background("reload", reloader.watch, failures):
        yield reloader
