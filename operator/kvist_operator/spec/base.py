"""What every section of the spec shares: camelCase in YAML, immutable, unknown names refused."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, TypeVar

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    StringConstraints,
    WithJsonSchema,
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
        raise ValueError("a duration is a number with one of the units ms, s, m, h, d, such as 30s")
    return float(match[1]) * _UNITS[match[2]]


def format_duration(seconds: float) -> str:
    """The form parse_duration reads, in the largest unit that is exact."""
    for unit in ("d", "h", "m", "s"):
        if seconds and seconds % _UNITS[unit] == 0:
            return f"{int(seconds / _UNITS[unit])}{unit}"
    return f"{round(seconds * 1000)}ms" if seconds else "0s"


_INT_OR_STRING: Final = WithJsonSchema({"x-kubernetes-int-or-string": True})
Quantity = Annotated[
    int,
    Field(ge=0),
    BeforeValidator(parse_quantity),
    PlainSerializer(format_quantity, return_type=str),
    _INT_OR_STRING,
]
Duration = Annotated[
    float,
    BeforeValidator(parse_duration),
    PlainSerializer(format_duration, return_type=str),
    _INT_OR_STRING,
]
Name = Annotated[
    str, StringConstraints(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", min_length=1, max_length=63)
]
Text = Annotated[str, StringConstraints(min_length=1, max_length=1024), AfterValidator(without_nul)]
Percent = Annotated[float, Field(ge=0.0, le=100.0)]
Overlay = dict[str, Any]
T = TypeVar("T")
# YAML has lists only; in a frozen object they become tuples, which strictness would refuse.
Items = Annotated[tuple[T, ...], Field(strict=False)]


class SecretRef(Section):
    """A key of a Secret in the cluster's namespace. Kubernetes only."""

    name: Name = Field(description="Name of the Secret.")
    key: Text = Field(default="token", description="Key inside the Secret. Default: token.")


class EnvVar(Section):
    """One environment variable of a program."""

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=256)] = Field(
        description="Name of the variable."
    )
    value: Annotated[str, StringConstraints(max_length=4096), AfterValidator(without_nul)] | None = Field(
        default=None, description="Its value. Default: none; then valueFrom must be given."
    )
    value_from: Overlay | None = Field(
        default=None,
        description="A Kubernetes EnvVarSource, such as secretKeyRef. Kubernetes only. Default: none.",
    )


class Resources(Section):
    """Kubernetes resource requests and limits. Kubernetes only."""

    requests: dict[str, str | int | float] = Field(
        default_factory=dict, description="Amounts by resource name, such as cpu: 4. Default: none."
    )
    limits: dict[str, str | int | float] = Field(
        default_factory=dict,
        description="Amounts by resource name, such as nvidia.com/gpu: 1. Default: none.",
    )
