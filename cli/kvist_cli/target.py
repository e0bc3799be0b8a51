"""Which cluster or agent a command means: a name, a run folder, an address, or the only one there is."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from kvist_cli.folders import expanded, state_folder
from kvist_cli.local.state import LOCK_FILE, STATE_FILE, ClusterState, RunFolder
from kvist_connector.errors import ConfigError
from kvist_operator.plan import Role


def known_clusters(environment: Mapping[str, str]) -> list[str]:
    """Names of the clusters with a state on this machine; what has no lock is no supervisor's (e2e's bed)."""
    folder = state_folder(environment)
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted(p.name for p in found if (p / STATE_FILE).is_file() and (p / LOCK_FILE).is_file())


def find(name: str | None, run_dir: Path | None, environment: Mapping[str, str]) -> RunFolder:
    """The run folder that is meant; raises ConfigError when none or several could be."""
    if run_dir is not None:
        return RunFolder(expanded(run_dir, "--run-dir").absolute())
    if name is not None:
        return RunFolder(state_folder(environment) / name)
    names = known_clusters(environment)
    if len(names) == 1:
        return RunFolder(state_folder(environment) / names[0])
    if not names:
        raise ConfigError("no cluster runs on this machine; start one with `kvist up -f FILE`")
    raise ConfigError(f"several clusters run on this machine, name one of {', '.join(names)}")


def read(folder: RunFolder) -> ClusterState:
    """Its state; raises ConfigError when there is none."""
    state = folder.read()
    if state is None:
        here = ", ".join(known_clusters(os.environ)) or "none"
        raise ConfigError(f"no cluster runs in {folder.path}; clusters of this machine: {here}")
    return state


def token(path: Path | None) -> str:
    """The text of a token file, empty without one; raises ConfigError when it holds none."""
    if path is None:
        return ""
    try:
        text = expanded(path, "--token-file").read_text().strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--token-file {path}: cannot be read: {error}; give the agents' token") from error
    if not text or not text.isascii() or not text.isprintable() or " " in text:
        raise ConfigError(
            f"--token-file {path}: must hold one token and nothing else; give the agents' token"
        )
    return text


def by_address(agents: list[str]) -> dict[str, str]:
    """Agents by host and port."""
    return {url.split("://")[-1].rstrip("/"): url.rstrip("/") for url in agents}


def agent_urls(
    name: str | None, run_dir: Path | None, agents: list[str], environment: Mapping[str, str]
) -> dict[str, str]:
    """Agents by replica name, of the cluster or as given; raises ConfigError when there are none."""
    if agents:
        return by_address(agents)
    state = read(find(name, run_dir, environment))
    found = {p.replica: p.url for p in state.programs if p.role is Role.AGENT}
    if not found:
        raise ConfigError(f"cluster {state.name!r} has no agents: its manifest says cache.enabled: false")
    return found
