"""The Python API of a local cluster: a blocking front over the supervisor's own thread.

Called by `kvist up` and `kvist demo`. Programs are named `agent-0`, `engine-0`, ..., `router`;
replicas `replica-0`, ... Every wait has a deadline; every failure is a ClusterError in words.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from kvist_cli.local.events import OnEvent, ignore
from kvist_cli.local.options import Options
from kvist_connector.errors import KvistError
from kvist_operator.spec import CacheCluster


class ClusterError(KvistError):
    """The cluster could not do it; the text says which program, why, and where its log is."""


@dataclass(frozen=True)
class Urls:
    """Base addresses without a trailing slash; engines and agents by replica name."""

    router: str
    router_admin: str
    engines: dict[str, str]
    agents: dict[str, str]  # empty with cache.enabled false


class Cluster:
    """A running cluster, owned by this process."""

    run_dir: Path
    urls: Urls

    @classmethod
    def up(cls, manifest: CacheCluster, options: Options | None = None, on_event: OnEvent = ignore) -> Self:
        """Check everything, start all programs in order, return when all are healthy.

        Raises ConfigError before anything starts (manifest against machine, ports, model), ClusterError
        when a program does not come up; nothing is left running then. `on_event` is called from
        the supervisor's thread.
        """
        raise NotImplementedError

    def kill(self, program: str) -> int:
        """SIGKILL the program and its children; the supervisor starts it again. Returns the dead pid."""
        raise NotImplementedError

    def restart(self, program: str, deadline: float = 600.0) -> None:
        """Stop it with SIGTERM, start it again, wait until it is healthy."""
        raise NotImplementedError

    def wait_ready(self, program: str, deadline: float = 600.0) -> float:
        """Wait until it is healthy (after kill(): the new process). Returns the seconds its start took."""
        raise NotImplementedError

    def pid(self, program: str) -> int:
        """Process id of the program now; raises ClusterError while it is not running."""
        raise NotImplementedError

    def log(self, program: str) -> Path:
        """Its log file."""
        raise NotImplementedError

    def down(self, *, flush: bool = True) -> None:
        """Stop router and engines, flush agents to disk, stop them, remove the arenas. Safe to call twice.

        With flush=False agents are stopped at once and the arenas stay: the next `up` finds them warm.
        """
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.down(flush=error is None)
