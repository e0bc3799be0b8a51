"""Sizes in bytes as people write them: "1Gi", "512Mi", "1.5G", 4096.

Called by every settings class and by the operator's spec. The suffixes are those of
Kubernetes quantities: k, M, G, T, P are powers of 1000, Ki, Mi, Gi, Ti, Pi powers of 1024.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, Field

_POWERS: Final = {
    "": 1,
    "k": 1000,
    "M": 1000**2,
    "G": 1000**3,
    "T": 1000**4,
    "P": 1000**5,
    "Ki": 1024,
    "Mi": 1024**2,
    "Gi": 1024**3,
    "Ti": 1024**4,
    "Pi": 1024**5,
}
_BINARY: Final = ("Pi", "Ti", "Gi", "Mi", "Ki")
_FORM: Final = re.compile(r"([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*([A-Za-z]*)")
# What the wire formats and the file system hold; no machine has as much.
_MOST: Final = 2**63 - 1


def parse_quantity(text: Any) -> int:
    """Bytes of a quantity; raises ValueError that says what is valid."""
    size = _bytes_of(text)
    if size > _MOST:
        raise ValueError("a size is less than 8192Pi")
    return size


def _bytes_of(text: Any) -> int:
    if isinstance(text, bool):
        raise ValueError("a size is a number with a suffix such as 512Mi or 1Gi, not true or false")
    if isinstance(text, int):
        if text < 0:
            raise ValueError("a size is not negative")
        return text
    match = _FORM.fullmatch(str(text).strip())
    if match is None or match[2] not in _POWERS:
        suffixes = ", ".join(filter(None, _POWERS))
        raise ValueError(f"a size is a number with one of the suffixes {suffixes}, such as 512Mi or 1G")
    number, power = match[1], _POWERS[match[2]]
    if "." not in number:
        return int(number) * power
    whole, fraction = number.split(".")
    return int(whole) * power + int(fraction) * power // int(10 ** len(fraction))


def format_quantity(size: int) -> str:
    """The shortest exact text with a binary suffix, else plain bytes; parse_quantity gives `size` back."""
    for suffix in _BINARY:
        if size and size % _POWERS[suffix] == 0:
            return f"{size // _POWERS[suffix]}{suffix}"
    return str(size)


def format_bytes(size: float) -> str:
    """Rounded for reading: 1.5 GiB. Not for parsing."""
    for suffix in _BINARY:
        if abs(size) >= _POWERS[suffix]:
            return f"{size / _POWERS[suffix]:.1f} {suffix}B"
    return f"{size:.0f} B"


def counted(count: int, noun: str) -> str:
    """`1 chunk`, `2 chunks`; thousands with commas."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


Quantity = Annotated[int, BeforeValidator(parse_quantity), Field(ge=0)]
