"""Errors of the operator, split by what the caller does next.

OperatorError
  ApiError         the API server refused or could not answer; `status` is its HTTP status, 0 without one
    NotFound         the object or its kind is gone: nothing to do here
    Conflict         somebody else changed it: read again
    Invalid          the object is wrong: tell the user, do not try again before it changes
    Forbidden        rights are missing: tell the user which
    TooMany          asked to wait (a disruption budget, a rate limit): try later
    Unavailable      server, network or deadline: back off
  NotLeader        another operator acts: stop at once
  NoAnswer         a router or agent did not answer: its view is unknown
"""

from __future__ import annotations


class OperatorError(Exception):
    """Base of every error the operator raises on purpose."""


class ApiError(OperatorError):
    """What the API server said, cut to a length that fits a condition's message."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message[:1024])
        self.status = status


class NotFound(ApiError):  # noqa: N818 - a state, not a fault
    """404 of a write, or of a kind that is not installed."""


class Conflict(ApiError):  # noqa: N818 - a state, not a fault
    """409: exists already, or is not the version or object that was meant."""


class Invalid(ApiError):  # noqa: N818 - a state, not a fault
    """400 or 422: refused for what it says."""


class Forbidden(ApiError):  # noqa: N818 - a state, not a fault
    """401 or 403."""


class TooMany(ApiError):  # noqa: N818 - a state, not a fault
    """429."""


class Unavailable(ApiError):  # noqa: N818 - a state, not a fault
    """5xx, a broken connection, or no answer before the deadline."""


class NotLeader(OperatorError):  # noqa: N818 - a state, not a fault
    """A write was attempted without a lease that is certainly held."""


class NoAnswer(OperatorError):  # noqa: N818 - a state, not a fault
    """A program of a cluster could not be asked."""


# A field that the kind does not have or of another type: the server has no status of its own for it.
_UNTYPED = "failed to create typed patch object"


def from_status(status: int, message: str) -> ApiError:
    """The class of an HTTP status."""
    if status == 500 and _UNTYPED in message:
        return Invalid(message, status)
    classes: dict[int, type[ApiError]] = {
        400: Invalid,
        401: Forbidden,
        403: Forbidden,
        404: NotFound,
        409: Conflict,
        410: Conflict,
        415: Invalid,
        422: Invalid,
        429: TooMany,
    }
    return classes.get(status, Unavailable if status >= 500 else ApiError)(message, status)
