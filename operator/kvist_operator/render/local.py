"""Plan -> processes of one machine. Pure: no file is written and no port opened here.

Called by `kvist up`, whose flags are the fields of `Machine`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import yaml

from kvist_connector.errors import ConfigError
from kvist_operator.plan import Plan, Program, Role, VolumeKind, fill, fill_yaml
from kvist_operator.plan.peers import PORT as PEER

# sun_path of a Unix socket, with its final zero, on Linux.
SOCKET_PATH_LIMIT: Final = 107
# The engine's KV events: sockets of the engine beside the agent's own.
EVENTS_SUFFIX: Final = ".events"
REPLAY_SUFFIX: Final = ".replay"
LOOPBACK: Final = "127.0.0.1"
_ANY: Final = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "": "127.0.0.1"}


@dataclass(frozen=True)
class Machine:
    """Where the processes live. Ports are first ones; the replica's ordinal is added to per-replica ports."""

    run_dir: Path
    arena_dir: Path
    host: str  # of the router; engines, agents and admin port listen on loopback only
    ports: Mapping[str, int]  # by port name of the plan: router, router-admin, engine, agent, peer
    python: str
    model: str  # resolved folder or hub name
    lora: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict)  # token of a path -> file with the secret
    devices: tuple[str, ...] = ()  # ids of CUDA devices, dealt out to the engines in order


@dataclass(frozen=True)
class Process:
    """One process to run and watch."""

    name: str
    role: Role
    replica: str  # "" for the router
    argv: tuple[str, ...]
    env: Mapping[str, str]
    files: Mapping[Path, str]
    folders: tuple[Path, ...]  # to be made before it starts
    ports: Mapping[str, int]
    url: str
    health_url: str
    start_deadline: float
    after: tuple[str, ...]  # names of processes that must be healthy first
    log: Path
    arena: Path | None = None
    memory: int = 0  # bytes of the arena
    disk: Path | None = None
    disk_size: int = 0
    socket: Path | None = None
    unset: tuple[str, ...] = ()


def render(plan: Plan, machine: Machine) -> tuple[Process, ...]:
    """All processes, in an order in which each comes after those that it waits for."""
    replicas = range(plan.replicas)
    found = [_process(plan, program, machine, i) for program in plan.per_replica for i in replicas]
    return (*found, _router(plan, machine, found))


def connect_host(host: str) -> str:
    """The address at which this machine reaches a program that listens on `host`."""
    return _ANY.get(host, f"[{host}]" if ":" in host else host)


def _process(plan: Plan, program: Program, machine: Machine, ordinal: int) -> Process:
    replica = f"replica-{ordinal}"
    values = _values(plan, machine, replica, ordinal)
    siblings = {p.role for p in plan.per_replica}
    after = tuple(f"{role}-{ordinal}" for role in program.after if role in siblings)
    process = _common(program, machine, values, f"{program.role}-{ordinal}", replica, after)
    if program.role is not Role.ENGINE or not machine.devices:
        return process
    first = ordinal * program.devices
    own = ",".join(machine.devices[first : first + program.devices])
    return replace(process, env={**process.env, "CUDA_VISIBLE_DEVICES": own})


def _router(plan: Plan, machine: Machine, others: list[Process]) -> Process:
    values = _values(plan, machine, "", 0)
    engines = tuple(p.name for p in others if p.role is Role.ENGINE)
    rendered = _common(plan.router, machine, values, "router", "", engines)
    files = {**rendered.files, Path(values["path.replicas"]): replicas_file(others)}
    return replace(rendered, files=files)


def replicas_file(processes: list[Process]) -> str:
    """What the router reads as `replicas_file`."""
    agents = {p.replica: p.url for p in processes if p.role is Role.AGENT}
    entries = [
        {"name": p.replica, "url": p.url, **({"agent": agents[p.replica]} if p.replica in agents else {})}
        for p in processes
        if p.role is Role.ENGINE
    ]
    return yaml.safe_dump(entries, sort_keys=False)


def _common(
    program: Program,
    machine: Machine,
    values: Mapping[str, str],
    name: str,
    replica: str,
    after: tuple[str, ...],
) -> Process:
    ports = {port: int(values[f"port.{port}"]) for port in program.ports}
    scheme = "https" if program.health.tls else "http"
    base = f"{scheme}://{LOOPBACK if replica else connect_host(machine.host)}"
    sizes = {volume.kind: volume.size for volume in program.volumes}
    is_agent = program.role is Role.AGENT
    disk = Path(values["path.disk"]) if VolumeKind.DISK in sizes else None
    folders = [machine.run_dir / "logs", Path(values["path.socket"]).parent if replica else machine.run_dir]
    return Process(
        name=name,
        role=program.role,
        replica=replica,
        argv=(machine.python, "-m", program.module, *(fill(a, values) for a in program.argv)),
        env={key: fill(text, values) for key, text in program.env.items()},
        unset=program.unset,
        files={machine.run_dir / file: fill_yaml(text, values) for file, text in program.files.items()},
        folders=(*folders, disk) if disk else tuple(folders),
        ports=ports,
        url=f"{base}:{ports[program.health.port]}",
        health_url=f"{base}:{ports[program.health.port]}{program.health.path}",
        start_deadline=program.health.deadline,
        after=after,
        log=machine.run_dir / "logs" / f"{name}.log",
        arena=Path(values["path.arena"]) if is_agent else None,
        memory=sizes.get(VolumeKind.ARENA, 0),
        disk=disk,
        disk_size=sizes.get(VolumeKind.DISK, 0),
        socket=Path(values["path.socket"]) if is_agent else None,
    )


def _values(plan: Plan, machine: Machine, replica: str, ordinal: int) -> dict[str, str]:
    per_replica = {port for program in plan.per_replica for port in program.ports}
    ports = {name: port + ordinal * (name in per_replica) for name, port in machine.ports.items()}
    # A machine without such a port has a plan without peers.
    first = machine.ports.get(PEER, 0)
    folder = machine.run_dir / replica
    socket = _socket(folder, plan.name, replica)
    wished = next((v.path for p in plan.per_replica for v in p.volumes if v.kind is VolumeKind.DISK), None)
    disk = _expanded(wished) / plan.name / replica if wished else folder / "disk"
    return {
        "host": LOOPBACK if replica else machine.host,
        "host.admin": LOOPBACK,
        "replica": replica,
        "path.model": machine.model,
        "path.config": str(machine.run_dir),
        "path.replicas": str(machine.run_dir / "replicas.yaml"),
        "path.socket": str(socket),
        "path.events": str(socket) + EVENTS_SUFFIX,
        "path.replay": str(socket) + REPLAY_SUFFIX,
        "path.arena": str(machine.arena_dir / f"kvist-{plan.name}-{replica}.arena"),
        "path.disk": str(disk),
        "peer.urls": ",".join(f"http://{LOOPBACK}:{first + i}" for i in range(plan.replicas)),
        "peer.address": f"http://{LOOPBACK}:{first + ordinal}",
        **machine.secrets,
        **{f"port.{name}": str(port) for name, port in ports.items()},
        **{f"lora.{name}": path for name, path in machine.lora.items()},
    }


def _expanded(path: str) -> Path:
    try:
        return Path(path).expanduser().absolute()
    except RuntimeError as error:
        raise ConfigError(
            f"spec.cache.disk.path: {path!r} begins with the home of an unknown user: give a full path"
        ) from error


def _socket(folder: Path, name: str, replica: str) -> Path:
    """In the replica's folder; where its path is too long for a socket, a short one under /tmp."""
    path = folder / "agent.sock"
    if len(str(path).encode()) + len(EVENTS_SUFFIX) <= SOCKET_PATH_LIMIT:
        return path
    digest = hashlib.blake2s(str(folder).encode(), digest_size=8).hexdigest()
    return Path("/tmp") / f"kvist-{digest}" / "agent.sock"
