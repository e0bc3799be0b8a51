"""One way to configure every program: one YAML file, environment, flags; the same names in each.

Called by the composition roots only. Precedence: flag, environment, file, default.
A settings class is a frozen pydantic model; every field says unit, default and reason in its
description, which is also its `--help` text. Unknown names fail with the nearest valid one.

    field `limits.body_bytes`   file:  limits: {body_bytes: 1048576}
                                flag:  --limits.body-bytes 1048576
                                env:   <PREFIX>LIMITS__BODY_BYTES=1048576

A flag or variable is taken as it is written; only a field that holds a list is read as YAML.
"""

from __future__ import annotations

import argparse
import difflib
import reprlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar, get_args, get_origin

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from kvist_connector.errors import ConfigError
from kvist_connector.yaml_text import YamlTextError, parse_documents

_EXPECTED: Final = {
    "tuple_type": "a list is expected",
    "list_type": "a list is expected",
    "dict_type": "a mapping is expected",
    "model_type": "a mapping is expected",
}
# Type of a PydanticCustomError whose value must not be shown: it holds a secret.
WITHHELD: Final = "withheld"
S = TypeVar("S", bound=BaseModel)


class Settings(BaseModel):
    """Base of every settings class: immutable, no unknown names, no infinite numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)


def without_nul(text: str) -> str:
    """What can be a path, an argument or an environment variable; raises ValueError."""
    if "\0" in text:
        raise ValueError("a zero byte cannot be passed on: leave it out")
    return text


def _names_a_file(path: Path) -> Path:
    without_nul(str(path))
    if not path.name:
        raise ValueError("this is a folder: give the path of a file")
    return path


FileLocation = Annotated[Path, AfterValidator(_names_a_file)]


def field_names(cls: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted name and field of every leaf."""
    for name, field in cls.model_fields.items():
        nested = _model_of(field.annotation)
        if nested is not None and get_origin(field.annotation) not in (list, tuple):
            yield from field_names(nested, f"{prefix}{name}.")
        else:
            yield prefix + name, field


class _Parser(argparse.ArgumentParser):
    """Says which flag may be meant."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        parsed, rest = self.parse_known_args(args, namespace)
        if rest:
            flags = {flag for action in self._actions for flag in action.option_strings}
            found = [likely(word.partition("=")[0], flags) for word in rest if word.startswith("--")]
            close = f"; did you mean {found[0]}?" if found and found[0] else ""
            self.error(f"unrecognized arguments: {' '.join(rest)}{close}")
        return parsed


def program_parser(prog: str, description: str, epilog: str, version: str) -> argparse.ArgumentParser:
    """The command line of a program; `add_flags` adds its settings."""
    parser = _Parser(
        prog=prog,
        usage="%(prog)s [--config FILE] [--SETTING VALUE ...]",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=version)
    return parser


def add_flags(parser: argparse.ArgumentParser, cls: type[BaseModel], env_prefix: str = "") -> None:
    """A flag for every field, `--config FILE` and `--print-config`; no abbreviations.

    With a prefix the help names the environment variable of each too.
    """
    parser.allow_abbrev = False
    parser.add_argument(
        "--config", metavar="FILE", type=Path, help="YAML file with the same names as the flags"
    )
    parser.add_argument(
        "--print-config", action="store_true", help="print the effective configuration and exit"
    )
    for name, field in field_names(cls):
        text = (field.description or "").replace("%", "%%")
        if env_prefix:
            text += f" [{variable_of(name, env_prefix)}]"
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, dest=f"field:{name}", metavar="VALUE", default=None, help=text)


def variable_of(name: str, env_prefix: str) -> str:
    """The environment variable of a setting by its dotted name."""
    return env_prefix + name.upper().replace(".", "__")


def load(cls: type[S], arguments: argparse.Namespace, environment: Mapping[str, str], env_prefix: str) -> S:
    """The effective settings; raises ConfigError with every wrong field in it."""
    values = _read_file(arguments.config) if arguments.config is not None else {}
    fields = dict(field_names(cls))
    for variable, text in environment.items():
        if variable.startswith(env_prefix):
            name = variable[len(env_prefix) :].lower().replace("__", ".")
            if name not in fields:
                raise ConfigError(
                    f"environment variable {variable}: no such setting{nearest(name, set(fields))}"
                )
            _put(values, name, _given(fields[name], text, f"environment variable {variable}"))
    for name, field in fields.items():
        given: str | None = getattr(arguments, f"field:{name}", None)
        if given is not None:
            _put(values, name, _given(field, given, f"--{name.replace('_', '-')}"))
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
        return f"{full}: no such field{nearest(str(item['loc'][-1]), names)}"
    if item["type"] == "missing":
        return f"{full}: required, but not given"
    if item["type"] == WITHHELD:
        return f"{full}: {item['msg']}"
    message = _EXPECTED.get(item["type"]) or item["msg"].removeprefix("Value error, ")
    # What is wrong with all of it together names its fields itself.
    return f"{full}: {brief(item['input'])} is not valid: {message}" if full else message


def brief(value: Any) -> str:
    """`repr` of at most a line, however large or deep the value is."""
    form = reprlib.Repr()
    form.maxstring = form.maxother = form.maxlong = 120
    return form.repr(value)


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


def nearest(name: str, names: set[str]) -> str:
    """End of a sentence about an unknown name: the likely one, or all there are."""
    close = likely(name, names)
    if close:
        return f"; did you mean {close!r}?"
    return f"; valid: {', '.join(sorted(names))}" if names else ""


def likely(name: str, names: set[str]) -> str:
    """The name that may be meant; empty when none is near."""
    return next(iter(difflib.get_close_matches(name, sorted(names), n=1, cutoff=0.5)), "")


def _given(field: Any, text: str, where: str) -> Any:
    """A flag or variable: text, nothing for an optional field left empty, YAML where a list is held."""
    kinds = (field.annotation, *get_args(field.annotation))
    if any(get_origin(kind) in (list, tuple) for kind in kinds):
        return _parse(text, where)
    return None if type(None) in kinds and text in ("", "null") else text


def _put(values: dict[str, Any], name: str, value: Any) -> None:
    *parents, last = name.split(".")
    for part in parents:
        values = values.setdefault(part, {})
        if not isinstance(values, dict):
            raise ConfigError(f"{part}: {brief(values)} is not valid: a mapping is expected, for {name}")
    values[last] = value


def _parse(text: str, where: str) -> Any:
    try:
        documents = parse_documents(text)
    except YamlTextError as error:
        raise ConfigError(f"{where}: not YAML: {error}") from error
    if len(documents) > 1:
        raise ConfigError(f"{where}: holds {len(documents)} YAML documents, one is expected")
    return documents[0] if documents else None


def _read_file(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--config {path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--config {path}: not UTF-8 text") from error
    loaded = _parse(text, f"--config {path}")
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError(f"--config {path}: must hold a mapping, not {type(loaded).__name__}")
    return loaded
