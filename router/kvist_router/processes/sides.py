"""What the two kinds of child have in common. Called by child.py, mind.py and relay.py of this package."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from prometheus_client import CollectorRegistry

from kvist_router.exposition import Exposition
from kvist_router.mind.interface import View
from kvist_router.server import Servers
from kvist_router.settings import RouterSettings

Role = Literal["mind", "relay"]  # the module of this package that builds it


@dataclass(frozen=True, slots=True)
class Sockets:
    """What a child inherits: the pair to the keeper, its port, and for the mind the relays' socket."""

    control: socket.socket
    listener: socket.socket
    relays: socket.socket | None


@dataclass(frozen=True, slots=True)
class Inherited:
    """What a side is built with, beside the settings; `mind` is the path of the mind's socket.

    `view`: what other relays were told by the mind, which may not be there now.
    """

    sockets: Sockets
    registry: CollectorRegistry
    exposition: Exposition
    mind: Path
    view: View | None


@dataclass(frozen=True, slots=True)
class Side:
    """What was built. `use` takes other settings and raises ConfigError; `view`: what a relay was told."""

    servers: Servers
    use: Callable[[RouterSettings], Awaitable[None]]
    view: Callable[[], View | None] = lambda: None
