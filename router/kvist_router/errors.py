"""Errors of the router, split by what the caller does next.

RouterError
  Refused            answer the client with the refusal inside
    Unavailable      no replica can take the request now: wait for one, or answer
  UpstreamError      an engine failed before its first body byte: try another, else 502
  FeedError          the mirror is not to be believed: reconnect, take a new snapshot
  NotExact           tokens cannot be derived here: ask an engine
  DiscoveryError     the list of replicas cannot be had: keep the last one, try again later
    Expired          a watch is too old: list again
"""

from __future__ import annotations

from kvist_router.mind.interface import Refusal


class RouterError(Exception):
    """Base of every error the router raises on purpose."""


class Refused(RouterError):  # noqa: N818 - an answer, not a fault
    """A request is answered with an error; `refusal` is the answer."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


class Unavailable(Refused):
    """There may be a replica in a moment."""


class UpstreamError(RouterError):
    """An engine could not be reached or broke off; `unreachable` when no connection came to be."""

    def __init__(self, message: str, *, unreachable: bool = False) -> None:
        super().__init__(message)
        self.unreachable = unreachable


class FeedError(RouterError):
    """A gap, a new epoch, or frames that are not understood."""


class NotExact(RouterError):  # noqa: N818 - a state, not a fault
    """Local rendering is not known to give the engine's tokens; the text says why."""


class DiscoveryError(RouterError):
    """The API server cannot be reached, refuses, or is not understood."""


class Expired(DiscoveryError):  # noqa: N818 - a state, not a fault
    """A watch cannot go on from its version."""
