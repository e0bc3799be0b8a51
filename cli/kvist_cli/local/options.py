"""Machine settings of `kvist up`: what a manifest cannot know. Each is a flag of the command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from kvist_connector import names
from kvist_connector.settings import Settings

PortNumber = Annotated[int, Field(ge=1, le=65535)]


class Ports(Settings):
    """First port of each kind; the replica's ordinal is added to all but the router's."""

    router: PortNumber = Field(default=names.PORT_ROUTER, description="OpenAI endpoint")
    router_admin: PortNumber = Field(default=names.PORT_ROUTER_ADMIN, description="router's admin endpoint")
    engine: PortNumber = Field(default=names.PORT_ENGINE, description="first engine")
    agent: PortNumber = Field(default=names.PORT_AGENT, description="first agent")
    peer: PortNumber = Field(
        default=names.PORT_PEER, description="first agent's for other agents, with cache.peers"
    )

    def by_plan_name(self) -> dict[str, int]:
        """As the plan names them."""
        return {name.replace("_", "-"): int(port) for name, port in self.model_dump().items()}


class Options(Settings):
    """Where and how a cluster runs on this machine."""

    run_dir: Path | None = Field(
        default=None, description="folder of state, logs and sockets; default <state folder>/kvist/<name>"
    )
    arena_dir: Path = Field(default=Path("/dev/shm"), description="folder of arenas, on a memory file system")
    secrets_dir: Path | None = Field(
        default=None,
        description="folder with a file NAME/KEY for each Secret that the manifest names; default "
        "<run folder>/secrets",
    )
    host: str = Field(default="127.0.0.1", description="address that the router listens on")
    ports: Ports = Field(default=Ports(), description="first ports")
    restarts: int = Field(
        default=5,
        ge=0,
        le=1000,
        description="restarts in a row, without being ready between, before giving up",
    )
    backoff: float = Field(
        default=1.0, gt=0, le=3600, description="seconds before the first restart; doubles up to 30"
    )
    stop_deadline: float = Field(default=30.0, gt=0, le=3600, description="seconds from SIGTERM to SIGKILL")
    flush_deadline: float = Field(
        default=60.0, gt=0, le=3600, description="seconds that `down` waits for chunks on their way to disk"
    )
