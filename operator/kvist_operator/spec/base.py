"""What every section of the spec shares: camelCase in YAML, immutable, unknown names refused."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Self, TypeVar

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    PlainSerializer,
    StringConstraints,
    WithJsonSchema,
    model_validator,
)
from pydantic.alias_generators import to_camel

from kvist_connector.quantity import format_quantity, parse_quantity
from kvist_connector.settings import Settings, without_nul

_UNITS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION: Final = re.compile(r"([0-9]{1,30}(?:\.[0-9]{1,30})?)(ms|s|m|h|d)")
_LONGEST: Final = 10 * 365 * 86400.0


class Section(Settings):
    """Base of every section. Only the YAML names are accepted, so that nothing has two spellings."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        alias_generator=to_camel,
        validate_by_name=False,
        # As the API server reads it: the text "2" is no number, 1 is no truth value.
        strict=True,
        # Built at first use: `kvist --help` needs no validator.
        defer_build=True,
    )


def parse_duration(value: Any) -> float:
    """Seconds of "30s", "5m", "2h", "7d" or a number; raises ValueError that says what is valid."""
    seconds = _seconds_of(value)
    if seconds > _LONGEST:
        raise ValueError("a duration is at most 3650d")
    return seconds


def _seconds_of(value: Any) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0:
        return float(value)
    match = _DURATION.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise ValueError("a duration is a number with one of the units ms, s, m, h, d, such as 30s or 90m")
    return float(match[1]) * _UNITS[match[2]]


def format_duration(seconds: float) -> str:
    """The form parse_duration reads, in the largest unit that is exact."""
    for unit in ("d", "h", "m", "s"):
        if seconds and seconds % _UNITS[unit] == 0:
            return f"{int(seconds / _UNITS[unit])}{unit}"
    return f"{round(seconds * 1000)}ms" if seconds else "0s"


def _int_or_string(pattern: str) -> WithJsonSchema:
    """A number or a text of this form; the pattern is asked of texts only."""
    return WithJsonSchema({"x-kubernetes-int-or-string": True, "pattern": f"^{pattern}$", "maxLength": 64})


def rules(*pairs: tuple[str, str]) -> ConfigDict:
    """(CEL expression, message): what the API server checks of a section."""
    listed: list[JsonValue] = [{"rule": rule, "message": message} for rule, message in pairs]
    return ConfigDict(json_schema_extra={"x-kubernetes-validations": listed})


_NUMBER: Final = r"[0-9]{1,30}(\.[0-9]{1,30})?"
Quantity = Annotated[
    int,
    Field(ge=0),
    BeforeValidator(parse_quantity),
    PlainSerializer(format_quantity, return_type=str),
    _int_or_string(rf"{_NUMBER}(k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?"),
]
Duration = Annotated[
    float,
    BeforeValidator(parse_duration),
    PlainSerializer(format_duration, return_type=str),
    _int_or_string(rf"{_NUMBER}(ms|s|m|h|d)"),
]
Name = Annotated[
    str, StringConstraints(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", min_length=1, max_length=63)
]
PLACEHOLDER: Final = re.compile(r"\$\(([a-z][A-Za-z0-9_.:/\-]*)\)")


def passable(text: str) -> str:
    """What can be an argument or a variable and is none of the plan's own placeholders; raises ValueError."""
    if found := PLACEHOLDER.search(text):
        raise ValueError(f"it holds {found[0]}, which only Kvist itself can fill in: write the value")
    return without_nul(text)


Text = Annotated[str, StringConstraints(min_length=1, max_length=1024), AfterValidator(passable)]
Percent = Annotated[float, Field(ge=0.0, le=100.0)]
Overlay = dict[str, Any]
T = TypeVar("T")
# YAML has lists only; in a frozen object they become tuples, which strictness would refuse.
Items = Annotated[tuple[T, ...], Field(strict=False)]


def _distinct(items: tuple[T, ...]) -> tuple[T, ...]:
    names = [getattr(item, "name", None) for item in items]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"name {name!r} is given twice; keep one of the two")
    return items


# A list whose entries are told apart by their names, by the API server too.
Named = Annotated[
    tuple[T, ...],
    Field(
        strict=False,
        max_length=256,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    ),
    AfterValidator(_distinct),
]


class SecretRef(Section):
    """A key of a Secret in the cluster's namespace. Kubernetes only."""

    name: Name = Field(description="Name of the Secret.")
    key: Text = Field(default="token", description="Key inside the Secret. Default: token.")


class EnvVar(Section):
    """One environment variable of a program."""

    model_config = rules(
        ("has(self.value) != has(self.valueFrom)", "give exactly one of value and valueFrom"),
    )
    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=256)] = Field(
        description="Name of the variable."
    )
    value: Annotated[str, StringConstraints(max_length=4096), AfterValidator(passable)] | None = Field(
        default=None, description="Its value. Default: none; then valueFrom must be given."
    )
    value_from: Overlay | None = Field(
        default=None,
        description="A Kubernetes EnvVarSource, such as secretKeyRef. Kubernetes only. Default: none.",
    )

    @model_validator(mode="after")
    def _one_of(self) -> Self:
        if (self.value is None) == (self.value_from is None):
            raise ValueError("give exactly one of value and valueFrom")
        return self


Amounts = Annotated[
    dict[
        Annotated[str, StringConstraints(min_length=1, max_length=253)],
        Annotated[
            str | int | float,
            WithJsonSchema({"x-kubernetes-int-or-string": True, "maxLength": 64}),
        ],
    ],
    Field(max_length=32),
]


class Resources(Section):
    """Kubernetes resource requests and limits. Kubernetes only."""

    requests: Amounts = Field(
        default_factory=dict, description="Amounts by resource name, such as cpu: 4. Default: none."
    )
    limits: Amounts = Field(
        default_factory=dict,
        description="Amounts by resource name, such as nvidia.com/gpu: 1. Default: none.",
    )
