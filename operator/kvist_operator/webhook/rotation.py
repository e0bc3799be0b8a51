"""What to do next about the webhook's certificates. Pure; keeper.py carries it out.

A new authority is added, then trusted beside the old one, and only then signs what is served; the old
one goes when every replica has long served the new certificate. So at every moment one of the trusted
authorities has signed what any replica serves, whatever replica and API server have not read yet.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

Time = datetime.datetime
Span = datetime.timedelta
MOST_KEPT: Final = 3  # authorities beside a new one; more are there only when keys were lost again and again


@dataclass(frozen=True)
class Lifetimes:
    """How long things are valid; `renew` and `replace` are what is left of it when the next is made."""

    authority: Span
    replace: Span
    serving: Span
    renew: Span
    overlap: Span  # until all replicas and API servers have read what changed


LIFETIMES: Final = Lifetimes(
    authority=Span(days=730),
    replace=Span(days=365),
    serving=Span(days=90),
    renew=Span(days=30),
    overlap=Span(hours=1),
)


class Step(StrEnum):
    """One write, or none."""

    NOTHING = "nothing"
    ADD = "add"  # an authority, to the Secret
    TRUST = "trust"  # the Secret's authorities, in the webhook configuration
    SERVE = "serve"  # a new certificate by the newest authority
    DROP = "drop"  # authorities before the newest, from the Secret


@dataclass(frozen=True)
class Authority:
    """One that is to be trusted."""

    id: str
    since: Time
    until: Time


@dataclass(frozen=True)
class Served:
    """The serving certificate; `authority` None: none of those in the Secret signed it."""

    authority: str | None
    since: Time
    until: Time
    names: frozenset[str]


@dataclass(frozen=True)
class State:
    """As read from the Secret and the configuration."""

    authorities: tuple[Authority, ...]  # oldest first
    can_sign: bool  # the key of the newest is there
    served: Served | None
    trusted: tuple[str, ...] | None  # ids; None: there is no configuration
    names: frozenset[str]  # that the serving certificate must have


@dataclass(frozen=True)
class Decision:
    """`kept` are the authorities that stay, for ADD and DROP."""

    step: Step
    reason: str
    kept: frozenset[str] = frozenset()


def decide(state: State, lifetimes: Lifetimes, now: Time) -> Decision:
    """The first thing to do."""
    valid = [item for item in state.authorities if item.until > now]
    newest = state.authorities[-1] if state.authorities else None
    if newest is None or not state.can_sign or newest not in valid:
        return _add(valid, state.served, "there is no authority that can sign")
    if len(state.authorities) == 1 and newest.until - now <= lifetimes.replace:
        return _add(valid, state.served, "the authority will end")
    if state.trusted is None:
        return Decision(Step.NOTHING, "there is no webhook configuration")
    if state.trusted != tuple(item.id for item in state.authorities):
        return Decision(Step.TRUST, "the configuration trusts others")
    reason = usable(state, now) or _due(state, newest, lifetimes, now)
    if reason:
        return Decision(Step.SERVE, reason)
    if len(state.authorities) > 1 and _settled(state, newest, lifetimes, now):
        return Decision(Step.DROP, "nothing served needs the older ones", frozenset({newest.id}))
    return Decision(Step.NOTHING, "nothing is due")


def usable(state: State, now: Time) -> str:
    """Why what is served is of no use now; empty when it is."""
    served = state.served
    if served is None:
        return "nothing is served"
    if served.authority is None:
        return "an authority that is gone signed what is served"
    if served.until <= now:
        return "what is served has ended"
    return "" if served.names >= state.names else "what is served lacks a name"


def _add(valid: list[Authority], served: Served | None, reason: str) -> Decision:
    # The signer of what is served stays, however many came after it.
    signer = served.authority if served is not None else None
    kept = [item.id for place, item in enumerate(reversed(valid)) if place < MOST_KEPT or item.id == signer]
    return Decision(Step.ADD, reason, frozenset(kept))


def _due(state: State, newest: Authority, lifetimes: Lifetimes, now: Time) -> str:
    """Why another certificate is to be served although this one works."""
    served = state.served
    if served is None or now - newest.since < lifetimes.overlap:
        return ""
    if served.authority != newest.id:
        return "the newest authority is trusted everywhere"
    return "what is served will end" if served.until - now <= lifetimes.renew else ""


def _settled(state: State, newest: Authority, lifetimes: Lifetimes, now: Time) -> bool:
    served = state.served
    return served is not None and served.authority == newest.id and now - served.since >= lifetimes.overlap
