"""What a renderer needs to know about one program; plain values.

Texts in argv, env and files may hold tokens `$(port.engine)`, `$(path.socket)`, ...: values that
only the place where the program runs knows. A renderer replaces every one of them; one
that it does not know is an error, so that none reaches a program.

    $(host)                address to listen on            $(replica)       replica-0, ...
    $(path.events)         the engine's KV events          $(path.replay)   and their replay: sockets
    $(host.admin)          of the router's admin port
    $(port.<port name>)    a port of the same replica      $(path.model)    folder or name of the model
    $(path.socket)         the agent's Unix socket         $(path.arena)    the arena file
    $(path.disk)           folder of the disk tier         $(path.config)   folder of its config files
    $(path.replicas)       the router's list of replicas   $(lora.<name>)   folder or name of an adapter
    $(service.engine)      Service of the engines          $(namespace)     of the cluster: Kubernetes only
    $(path.token)          file with the agents' token: Kubernetes only
    $(peer.urls)           of all replicas' agents         $(peer.address) this one's of them
    $(path.agent-tls/<file>)  certificate, key and CA of agents: Kubernetes only
    $(path.access/<file>)  API keys, certificate, the secret of tenants (plan/access.py)
    $(redis.urls)          of a managed Redis              $(path.redis-password), $(path.redis-ca)
    $(path.redis-sentinel-password), $(path.object-store-credentials), $(path.encryption-keys): files
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

import yaml

from kvist_operator.spec.base import PLACEHOLDER

TOKEN: Final = PLACEHOLDER


class Role(StrEnum):
    """The kinds of programs of a cluster."""

    AGENT = "agent"
    ENGINE = "engine"
    ROUTER = "router"


class VolumeKind(StrEnum):
    """What a program needs from the place where it runs."""

    ARENA = "arena"  # memory file system, `size` bytes reserved at start
    RUN = "run"  # socket shared by agent and engine
    DISK = "disk"  # the disk tier, `size` bytes
    MODEL = "model"  # weights and tokenizer, read-only


@dataclass(frozen=True)
class Volume:
    """A folder; `size` in bytes, 0 when it does not matter."""

    kind: VolumeKind
    size: int = 0
    path: str | None = None  # wished by the manifest, on one machine only


@dataclass(frozen=True)
class Health:
    """GET `path` on the port of this name answers 200 once the program works."""

    port: str
    path: str
    deadline: float  # seconds a start may take
    tls: bool = False


@dataclass(frozen=True)
class Program:
    """One program of the cluster, or one per replica."""

    role: Role
    module: str  # run as `python -m <module>`
    argv: tuple[str, ...]
    health: Health
    ports: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    unset: tuple[str, ...] = ()  # variables that must not reach it from where it is started
    files: Mapping[str, str] = field(default_factory=dict)  # config file name -> text
    volumes: tuple[Volume, ...] = ()
    devices: int = 0  # accelerators it takes; 0 on CPUs
    after: tuple[Role, ...] = ()  # started when programs of these roles are healthy


@dataclass(frozen=True)
class Plan:
    """All programs of a cluster: `agent` and `engine` once per replica, one router."""

    name: str
    replicas: int
    engine: Program
    router: Program
    agent: Program | None = None

    @property
    def per_replica(self) -> tuple[Program, ...]:
        """The programs of each replica, in the order they are started."""
        return (self.agent, self.engine) if self.agent is not None else (self.engine,)


def fill(text: str, values: Mapping[str, str]) -> str:
    """`text` with every token replaced; raises KeyError with the token that has no value."""
    return TOKEN.sub(lambda match: values[match[1]], text)


def fill_yaml(text: str, values: Mapping[str, str]) -> str:
    """The same inside the parsed values of a config file, so that a path needs no quoting."""
    return yaml.safe_dump(_fill_tree(yaml.safe_load(text), values), sort_keys=False, allow_unicode=True)


def _fill_tree(value: object, values: Mapping[str, str]) -> object:
    if isinstance(value, dict):
        return {key: _fill_tree(item, values) for key, item in value.items()}
    if isinstance(value, list):
        return [_fill_tree(item, values) for item in value]
    if isinstance(value, str) and (text := fill(value, values)) != value:
        return int(text) if text.isdecimal() else text
    return value
