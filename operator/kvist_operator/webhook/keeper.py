"""Keeps the webhook's certificates: the leader renews them, every operator serves them. Built by run.py.

All is in one Secret that the chart made, so that one write changes authority and certificate together.
"""

from __future__ import annotations

import base64
import binascii
import datetime
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from kvist_operator.control.api import Api
from kvist_operator.control.errors import NotLeader
from kvist_operator.control.resources import SECRETS, Object, Resource
from kvist_operator.webhook import certificates
from kvist_operator.webhook.certificates import Material
from kvist_operator.webhook.rotation import (
    LIFETIMES,
    Authority,
    Decision,
    Lifetimes,
    State,
    Step,
    decide,
    usable,
)

_log = logging.getLogger(__name__)
MOST_STEPS: Final = 6  # of one turn: from nothing to everything takes three


@dataclass(frozen=True)
class ClusterResource(Resource):
    """A kind without namespaces."""

    def path(self, namespace: str | None, name: str = "", subresource: str = "") -> str:
        """As Resource; the namespace is not looked at."""
        return super().path(None, name, subresource)


CONFIGURATIONS: Final = ClusterResource(
    "admissionregistration.k8s.io", "v1", "validatingwebhookconfigurations", "ValidatingWebhookConfiguration"
)


@dataclass(frozen=True)
class Place:
    """Where the certificates are, and for whom."""

    namespace: str
    secret: str
    configuration: str
    names: tuple[str, ...]  # that the API server calls the webhook by; the first is the certificate's subject
    lifetimes: Lifetimes = LIFETIMES


class Keeper:
    """The leader's part; `leading` is asked before anything is read, writes are fenced by `api`."""

    def __init__(
        self, api: Api, place: Place, leading: Callable[[], bool], now: Callable[[], datetime.datetime]
    ) -> None:
        self._api = api
        self._place = place
        self._leading = leading
        self._now = now
        self._told = ""

    async def turn(self) -> None:
        """Whatever is due. Raises ApiError."""
        try:
            for _ in range(MOST_STEPS):
                if not self._leading() or not await self._step():
                    return
        except NotLeader as error:
            _log.info("certificates are left to the operator that leads: %s", error)

    async def _step(self) -> bool:
        """One write; False when there is nothing more to do now."""
        place = self._place
        secret = await self._api.get(SECRETS, place.namespace, place.secret)
        if secret is None:
            self._tell(f"Secret {place.namespace}/{place.secret} is not there: `helm upgrade` makes it again")
            return False
        configuration = await self._api.get(CONFIGURATIONS, "", place.configuration)
        if configuration is None:
            remedy = "`helm upgrade` makes it again, or set webhook.configuration to what it is called"
            self._tell(f"ValidatingWebhookConfiguration {place.configuration} is not there: {remedy}")
        else:
            self._tell("")
        material, now = certificates.read(decoded(secret)), self._now()
        state = state_of(material, configuration, place.names)
        decision = decide(state, place.lifetimes, now)
        if decision.step is Step.NOTHING:
            return False
        _log.info("webhook certificates: %s, since %s", decision.step, decision.reason)
        if decision.step is Step.TRUST and configuration is not None:
            await self._trust(configuration, material)
            # What works is changed no further before replicas and API servers have read this.
            return bool(usable(state, now))
        wished = carried_out(decision, material, place, now)
        await self._api.replace(SECRETS, {**secret, "data": encoded(secret, certificates.write(wished))})
        return True

    async def _trust(self, configuration: Object, material: Material) -> None:
        text = base64.b64encode(certificates.bundle(material.authorities)).decode()
        hooks = [
            {"name": hook["name"], "clientConfig": {"caBundle": text}}
            for hook in configuration.get("webhooks") or ()
        ]
        await self._api.patch(CONFIGURATIONS, "", self._place.configuration, {"webhooks": hooks})

    def _tell(self, problem: str) -> None:
        if problem and problem != self._told:
            _log.warning("the webhook is not called: %s", problem)
        self._told = problem


class Reader:
    """Every operator's part: hands `load` what the Secret says, when it is new. `load` raises ValueError."""

    def __init__(self, api: Api, place: Place, load: Callable[[bytes, bytes], None]) -> None:
        self._api = api
        self._place = place
        self._load = load
        self._loaded: tuple[bytes, bytes] | None = None

    async def turn(self) -> None:
        """Raises ApiError."""
        secret = await self._api.get(SECRETS, self._place.namespace, self._place.secret)
        material = certificates.read(decoded(secret) if secret is not None else {})
        found = certificates.write(material)
        chain = found[certificates.CHAIN], found[certificates.CHAIN_KEY]
        if material.served is None or chain == self._loaded:
            return
        self._load(*chain)
        self._loaded = chain
        _log.info("webhook: serving a certificate until %s", material.served.until)


def carried_out(decision: Decision, material: Material, place: Place, now: datetime.datetime) -> Material:
    """What the Secret shall hold after ADD, SERVE or DROP."""
    if decision.step is Step.ADD:
        return certificates.add_authority(material, decision.kept, now, place.lifetimes)
    if decision.step is Step.SERVE:
        return certificates.add_serving(material, place.names, now, place.lifetimes)
    return certificates.trim(material, decision.kept)


def state_of(material: Material, configuration: Object | None, names: tuple[str, ...]) -> State:
    """What rotation.py decides on."""
    authorities = tuple(
        Authority(
            certificates.fingerprint(item),
            item.not_valid_before_utc + certificates.SKEW,
            item.not_valid_after_utc,
        )
        for item in material.authorities
    )
    return State(
        authorities,
        material.signer is not None,
        material.served,
        None if configuration is None else trusted(configuration),
        frozenset(names),
    )


def trusted(configuration: Object) -> tuple[str, ...]:
    """Ids of the authorities that all webhooks of the configuration trust."""
    bundles = {
        str((hook.get("clientConfig") or {}).get("caBundle") or "")
        for hook in configuration.get("webhooks") or ()
    }
    if len(bundles) != 1:
        return ()
    found = certificates.certificates(_decoded(bundles.pop()))
    return tuple(certificates.fingerprint(item) for item in found)


def decoded(secret: Object) -> dict[str, bytes]:
    """A Secret's data; what is no base64 is empty."""
    return {name: _decoded(text) for name, text in (secret.get("data") or {}).items()}


def encoded(secret: Object, data: Mapping[str, bytes]) -> dict[str, str]:
    """Over what else the Secret holds."""
    fresh = {name: base64.b64encode(value).decode() for name, value in data.items()}
    return {**(secret.get("data") or {}), **fresh}


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return b""
