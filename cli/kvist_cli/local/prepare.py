"""Everything before the first process: resolve the model, plan, render, check. Starts nothing.

Raises ConfigError with field, value and remedy for all that is wrong.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvist_cli import folders, models
from kvist_cli.local import machine
from kvist_cli.local.events import Event, EventKind, OnEvent
from kvist_cli.local.options import Options
from kvist_cli.local.ports import check_ports
from kvist_cli.local.state import RunFolder
from kvist_connector.errors import ConfigError
from kvist_operator.plan import Target, cpu_target, cuda_target, make_plan
from kvist_operator.plan.access import SECRET, access_files, access_token
from kvist_operator.plan.tiers import external_secrets
from kvist_operator.render.local import Machine, Process, render
from kvist_operator.spec import CacheCluster
from kvist_operator.spec.checks import first_violation
from kvist_operator.spec.local_use import ignored_locally

TENANT_SECRET: Final = "tenants.secret"  # in the run folder


@dataclass(frozen=True)
class Prepared:
    """A checked cluster, ready to start."""

    cluster: CacheCluster
    run_dir: Path
    model: Path
    processes: tuple[Process, ...]


def run_folder(name: str, options: Options, environment: Mapping[str, str]) -> Path:
    """Where the cluster of this name keeps its run."""
    if options.run_dir is not None:
        return folders.expanded(options.run_dir, "--run-dir").absolute()
    return (folders.state_folder(environment) / name).absolute()


def prepare(
    cluster: CacheCluster, options: Options, environment: Mapping[str, str], on_event: OnEvent
) -> Prepared:
    """Resolve, plan, render and check; may convert or fetch a model, which `on_event` hears of."""
    ignored = ignored_locally(cluster)
    if ignored:
        on_event(Event(EventKind.NOTE, "", f"only for Kubernetes, not used here: {', '.join(ignored)}"))
    if not options.arena_dir.is_dir():
        raise ConfigError(f"--arena-dir: '{options.arena_dir}' is not a folder; /dev/shm is the usual one")
    run_dir = run_folder(cluster.name, options, environment)
    folders.check_usable(options.arena_dir, "--arena-dir")
    folders.check_usable(run_dir, "--run-dir")
    cpu = on_cpu(cluster, environment)
    model = models.resolve(
        cluster.spec.model.name,
        cluster.spec.model.revision,
        environment,
        lambda text: on_event(Event(EventKind.NOTE, "", text)),
    )
    lora = {
        adapter.name: str(
            models.resolve_adapter(adapter.path, f"spec.model.loraAdapters.{i}.path", environment)
        )
        for i, adapter in enumerate(cluster.spec.model.lora_adapters)
    }
    processes = _render(cluster, options, environment, model, lora, run_dir, cpu)
    arenas = [p.arena for p in processes if p.arena is not None]
    disks = [p.disk for p in processes if p.disk is not None]
    for disk in disks:
        folders.check_usable(disk, "spec.cache.disk.path")
    facts = machine.gather(cluster, model, options.arena_dir, arenas, disks, cpu)
    violation = first_violation(cluster, facts)
    if violation is not None:
        raise ConfigError(str(violation))
    check_ports(processes, options.host)
    return Prepared(cluster, run_dir, model, processes)


def on_cpu(cluster: CacheCluster, environment: Mapping[str, str]) -> bool:
    """Whether engines compute on the CPU here; raises ConfigError when no engine is installed."""
    if not machine.engine_installed():
        raise ConfigError(
            "vLLM is not installed here: `make setup` in a checkout installs it for CPUs, the extra engine "
            "for CUDA; see docs/install.md"
        )
    wished = cluster.spec.engine.device
    if wished == "cuda" and machine.cpu_build_installed():
        raise ConfigError(
            "spec.engine.device: 'cuda' is not possible: the CPU build of vLLM is installed here; give auto "
            "or cpu, or start it from an environment with vLLM for CUDA (docs/install.md)"
        )
    if wished != "auto":
        return wished == "cpu"
    return machine.cpu_build_installed() or not machine.cuda_devices(environment)


def _render(
    cluster: CacheCluster,
    options: Options,
    environment: Mapping[str, str],
    model: Path,
    lora: Mapping[str, str],
    run_dir: Path,
    cpu: bool,
) -> tuple[Process, ...]:
    target = _target(cpu)
    return render(
        make_plan(cluster, target),
        Machine(
            run_dir=run_dir,
            arena_dir=options.arena_dir,
            host=options.host,
            ports=options.ports.by_plan_name(),
            python=sys.executable,
            model=str(model),
            lora=lora,
            secrets=_secrets(cluster, options, run_dir),
            devices=() if cpu else machine.cuda_devices(environment),
        ),
    )


def _secrets(cluster: CacheCluster, options: Options, run_dir: Path) -> dict[str, str]:
    folder = run_dir / "secrets"
    if options.secrets_dir is not None:
        folder = folders.expanded(options.secrets_dir, "--secrets-dir").absolute()
    wanted = {token: (secret.field, secret.ref) for token, secret in external_secrets(cluster).items()}
    wanted |= {access_token(file.name): (file.field, file.ref) for file in access_files(cluster)}
    found = {access_token(SECRET): str(run_dir / TENANT_SECRET)}
    for token, (field, ref) in wanted.items():
        path = folder / ref.name / ref.key
        if not path.is_file():
            raise ConfigError(
                f"{field}: '{path}' is not there: put the Secret's value into this file, or name "
                "another folder with --secrets-dir"
            )
        found[token] = str(path)
    return found


def keep_tenant_secret(folder: RunFolder) -> None:
    """What tenants' salts are made with: made once, since with another one every tenant begins anew."""
    if not (folder.path / TENANT_SECRET).exists():
        folder.keep(TENANT_SECRET, secrets.token_hex(32), mode=0o600)


def _target(cpu: bool) -> Target:
    if not cpu:
        return cuda_target(offline=True)
    return cpu_target(len(os.sched_getaffinity(0)), offline=True)
