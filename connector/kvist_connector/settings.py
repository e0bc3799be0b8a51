"""One way to configure every program: one YAML file, environment, flags; the same names in each.

Called by the composition roots only. Precedence: flag, environment, file, default.
A settings class is a frozen pydantic model; every field says unit, default and reason in its
description, which is also its `--help` text. Unknown names fail with the nearest valid one.

    field `limits.body_bytes`   file:  limits: {body_bytes: 1048576}
                                flag:  --limits.body-bytes 1048576
                                env:   <PREFIX>LIMITS__BODY_BYTES=1048576
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from kvist_connector.errors import ConfigError

S = TypeVar("S", bound=BaseModel)


class Settings(BaseModel):
    """Base of every settings class: immutable, no unknown names."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


def field_names(cls: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted name and field of every leaf."""
    for name, field in cls.model_fields.items():
        nested = _model_of(field.annotation)
        if nested is not None and get_origin(field.annotation) not in (list, tuple):
            yield from field_names(nested, f"{prefix}{name}.")
        else:
            yield prefix + name, field


def add_flags(parser: argparse.ArgumentParser, cls: type[BaseModel]) -> None:
    """A flag for every field, `--config FILE` and `--print-config`."""
    parser.add_argument(
        "--config", metavar="FILE", type=Path, help="YAML file with the same names as the flags"
    )
    parser.add_argument(
        "--print-config", action="store_true", help="print the effective configuration and exit"
    )
    for name, field in field_names(cls):
        text = (field.description or "").replace("%", "%%")
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, dest=f"field:{name}", metavar="VALUE", default=None, help=text)


def load(cls: type[S], arguments: argparse.Namespace, environment: Mapping[str, str], env_prefix: str) -> S:
    """The effective settings; raises ConfigError with every wrong field in it."""
    values: dict[str, Any] = {}
    if arguments.config is not None:
        values = _read_yaml(arguments.config)
    names = {name for name, _ in field_names(cls)}
    for variable, text in environment.items():
        if variable.startswith(env_prefix):
            name = variable[len(env_prefix) :].lower().replace("__", ".")
            if name not in names:
                raise ConfigError(f"environment variable {variable}: no such setting{_nearest(name, names)}")
            _put(values, name, yaml.safe_load(text))
    for name in names:
        given: str | None = getattr(arguments, f"field:{name}", None)
        if given is not None:
            _put(values, name, yaml.safe_load(given) if given else "")
    return validate(cls, values)


def validate(cls: type[S], values: Any, where: str = "") -> S:
    """`cls` from plain data; raises ConfigError naming field, value and what is valid."""
    try:
        return cls.model_validate(values)
    except ValidationError as error:
        lines = [_explain(cls, item, where) for item in error.errors()]
        raise ConfigError("\n".join(lines)) from error


def to_yaml(settings: BaseModel) -> str:
    """What `--print-config` prints; reading it back gives equal settings."""
    return yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False)


def _explain(cls: type[BaseModel], item: Any, where: str) -> str:
    path = ".".join(str(part) for part in item["loc"])
    full = f"{where}.{path}" if where and path else where or path
    if item["type"] == "extra_forbidden":
        names = _names_at(cls, item["loc"][:-1])
        return f"{full}: no such field{_nearest(str(item['loc'][-1]), names)}"
    if item["type"] == "missing":
        return f"{full}: required, but not given"
    message = item["msg"].removeprefix("Value error, ")
    return f"{full}: {item['input']!r} is not valid: {message}"


def _names_at(cls: type[BaseModel], location: tuple[Any, ...]) -> set[str]:
    current: type[BaseModel] = cls
    for part in location:
        if isinstance(part, int):
            continue
        field = current.model_fields.get(part) or next(
            (f for f in current.model_fields.values() if f.alias == part), None
        )
        nested = _model_of(field.annotation) if field is not None else None
        if nested is None:
            return set()
        current = nested
    return {field.alias or name for name, field in current.model_fields.items()}


def _model_of(annotation: Any) -> type[BaseModel] | None:
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
        for inner in get_args(candidate):
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                return inner
    return None


def _nearest(name: str, names: set[str]) -> str:
    close = difflib.get_close_matches(name, sorted(names), n=1, cutoff=0.5)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; valid: {', '.join(sorted(names))}" if names else ""


def _put(values: dict[str, Any], name: str, value: Any) -> None:
    *parents, last = name.split(".")
    for part in parents:
        values = values.setdefault(part, {})
    values[last] = value


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        loaded = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"--config {path}: cannot be read: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"--config {path}: not YAML: {error}") from error
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError(f"--config {path}: must hold a mapping, not {type(loaded).__name__}")
    return loaded
