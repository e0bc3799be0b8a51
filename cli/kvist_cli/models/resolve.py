"""`model.name` is a folder, the demo's model, or a Hugging Face name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from kvist_cli.folders import hub_folder
from kvist_cli.models.demo import DEMO_MODEL, demo_model
from kvist_cli.models.worker import run_worker
from kvist_connector.errors import ConfigError
from kvist_connector.quantity import format_bytes

_FETCH_DEADLINE: Final = 6 * 3600.0
_FIELD: Final = "spec.model.name"
_MODEL_MARK, _ADAPTER_MARK = "config.json", "adapter_config.json"

Progress = Callable[[str], None]


def resolve(
    name: str, revision: str | None, environment: Mapping[str, str], on_progress: Progress = lambda _: None
) -> Path:
    """The model's folder; raises ConfigError that says what is missing and what to do."""
    try:
        if name == DEMO_MODEL:
            return demo_model(environment, on_progress)
        return _find(name, revision, _MODEL_MARK, environment, on_progress)
    except ConfigError as error:
        raise ConfigError(f"{_FIELD}: {name!r}: {error}") from error


def resolve_adapter(
    path: str, field: str, environment: Mapping[str, str], on_progress: Progress = lambda _: None
) -> Path:
    """The folder of a LoRA adapter; `field` names it in the ConfigError."""
    try:
        return _find(path, None, _ADAPTER_MARK, environment, on_progress)
    except ConfigError as error:
        raise ConfigError(f"{field}: {path!r}: {error}") from error


def _find(
    name: str, revision: str | None, mark: str, environment: Mapping[str, str], on_progress: Progress
) -> Path:
    try:
        folder = Path(name).expanduser()
    except RuntimeError as error:
        raise ConfigError("it begins with the home of an unknown user: give a full path") from error
    if name.startswith(("/", "./", "../", "~")) or folder.is_dir():
        return _folder(folder, mark)
    on_progress(f"looking for {name} in the Hugging Face cache, then on the hub")
    arguments = [name] if revision is None else [name, revision]

    def still(seconds: float) -> None:
        there = format_bytes(_fetched(name, environment))
        on_progress(f"{name}: {there} in the Hugging Face cache after {seconds:.0f} s")

    return Path(run_worker("kvist_cli.models.fetch_hub", arguments, environment, _FETCH_DEADLINE, still))


def _fetched(name: str, environment: Mapping[str, str]) -> int:
    """Bytes of a model in the cache of the hub's library, whole files and parts."""
    blobs = hub_folder(environment) / f"models--{name.replace('/', '--')}" / "blobs"
    return sum(file.stat().st_size for file in blobs.glob("*")) if blobs.is_dir() else 0


def _folder(folder: Path, mark: str) -> Path:
    if not folder.is_dir():
        raise ConfigError("there is no such folder; give an existing one or a Hugging Face name")
    if not (folder / mark).is_file():
        raise ConfigError(f"the folder has no {mark}, so it is not in Hugging Face form")
    return folder.absolute()
