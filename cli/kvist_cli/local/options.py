"""Machine settings of `kvist up`: what a manifest cannot know. Each is a flag of the command."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from kvist_connector import names
from kvist_connector.settings import Settings


class Ports(Settings):
    """First port of each kind; the replica's ordinal is added to those of engines and agents."""

    router: int = Field(default=names.PORT_ROUTER, ge=1, le=65535, description="OpenAI endpoint")
    router_admin: int = Field(
        default=names.PORT_ROUTER_ADMIN, ge=1, le=65535, description="router's admin port"
    )
    engine: int = Field(default=names.PORT_ENGINE, ge=1, le=65535, description="first engine")
    agent: int = Field(default=names.PORT_AGENT, ge=1, le=65535, description="first agent")
    kv_events: int = Field(default=names.PORT_KV_EVENTS, ge=1, le=65535, description="first engine's KV events")
    kv_events_replay: int = Field(
        default=names.PORT_KV_EVENTS_REPLAY, ge=1, le=65535, description="first engine's KV event replay"
    )


class Options(Settings):
    """Where and how a cluster runs on this machine."""

    run_dir: Path | None = Field(
        default=None, description="folder of state, logs and sockets; default: <state folder>/kvist/<name>"
    )
    arena_dir: Path = Field(default=Path("/dev/shm"), description="folder of the arenas, on a memory file system")
    host: str = Field(default="127.0.0.1", description="address that engines, agents and router listen on")
    ports: Ports = Field(default_factory=Ports, description="first ports")
    restarts: int = Field(
        default=5, ge=0, le=1000, description="restarts in a row, without a ready program between, before giving up"
    )
    backoff: float = Field(default=1.0, gt=0, description="seconds before the first restart; doubles up to 30")
    stop_deadline: float = Field(default=30.0, gt=0, description="seconds from SIGTERM to SIGKILL of a program")
    flush_deadline: float = Field(
        default=60.0, gt=0, description="seconds that `down` waits for chunks on their way to disk"
    )
