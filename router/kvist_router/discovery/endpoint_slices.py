"""EndpointSlices of one Service, and the replicas in them. Pure; called by kubernetes.py.

A Service that publishes not-ready addresses has `ready: true` on every endpoint, so what counts is
`serving`: whether the pod is ready, its readiness gates included. A pod may be in more than one slice,
while slices are rebalanced or one for each address family: it is one replica.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

from kvist_connector.errors import ConfigError
from kvist_connector.settings import validate
from kvist_router.discovery.source import Listed
from kvist_router.settings import ReplicaSettings

ENGINE_PORT: Final = "engine"  # names of the Service's ports
AGENT_PORT: Final = "agent"
_FAMILIES: Final = ("IPv4", "IPv6")  # preferred first


class Metadata(msgspec.Struct, frozen=True, rename="camel"):
    """Of a slice, a list or a bookmark."""

    name: str = ""
    resource_version: str = ""


class Conditions(msgspec.Struct, frozen=True):
    """None is what the API calls unknown."""

    ready: bool | None = None
    serving: bool | None = None
    terminating: bool | None = None


class Target(msgspec.Struct, frozen=True):
    """What an endpoint is."""

    kind: str = ""
    name: str = ""


class Endpoint(msgspec.Struct, frozen=True, rename="camel"):
    """One pod."""

    addresses: list[str] = []
    conditions: Conditions = Conditions()
    target_ref: Target | None = None


class Port(msgspec.Struct, frozen=True):
    """A port of all endpoints of a slice."""

    name: str | None = None
    port: int | None = None


class Slice(msgspec.Struct, frozen=True, rename="camel"):
    """discovery.k8s.io/v1 EndpointSlice, as far as it is used."""

    metadata: Metadata
    address_type: str = ""
    endpoints: list[Endpoint] | None = None
    ports: list[Port] | None = None


class SliceList(msgspec.Struct, frozen=True):
    """Answer to a list."""

    metadata: Metadata
    items: list[Slice] | None = None


class Slices:
    """The slices as of `version`."""

    def __init__(self, found: SliceList, agent_scheme: str = "http") -> None:
        self._agent_scheme = agent_scheme
        self._slices = {item.metadata.name: item for item in found.items or ()}
        self.version = found.metadata.resource_version
        self.problem = ""

    def put(self, item: Slice) -> None:
        """A slice came or changed."""
        self._slices[item.metadata.name] = item
        self.version = item.metadata.resource_version

    def drop(self, item: Slice) -> None:
        """A slice went."""
        self._slices.pop(item.metadata.name, None)
        self.version = item.metadata.resource_version

    def listed(self) -> tuple[Listed, ...]:
        """Replicas by name; what cannot be one is left out and named in `problem`."""
        self.problem = ""
        found: dict[str, tuple[tuple[bool, int], Listed]] = {}
        for item in self._slices.values():
            if item.address_type not in _FAMILIES:
                continue
            for listed in self._of(item):
                # Of a pod in two slices the one that is not going away is the newer view.
                rank = (listed.draining, _FAMILIES.index(item.address_type))
                known = found.get(listed.replica.name)
                if known is None or rank < known[0]:
                    found[listed.replica.name] = (rank, listed)
        return tuple(found[name][1] for name in sorted(found))

    def _of(self, item: Slice) -> Iterator[Listed]:
        ports = {port.name: port.port for port in item.ports or () if port.port}
        for endpoint in item.endpoints or ():
            name, address = _name(endpoint), _host(item, endpoint)
            if not name or not address:
                continue
            if ENGINE_PORT not in ports:
                self.problem = f"EndpointSlice {item.metadata.name} has no port named {ENGINE_PORT!r}: add it"
                continue
            agent = f"{self._agent_scheme}://{address}:{ports[AGENT_PORT]}" if AGENT_PORT in ports else None
            values = {"name": name, "url": f"http://{address}:{ports[ENGINE_PORT]}", "agent": agent}
            try:
                replica = validate(ReplicaSettings, values, f"EndpointSlice {item.metadata.name}")
            except ConfigError as error:
                self.problem = str(error)
                continue
            conditions = endpoint.conditions
            yield Listed(replica, _serving(conditions), conditions.terminating is True)


def _serving(conditions: Conditions) -> bool:
    known = conditions.serving if conditions.serving is not None else conditions.ready
    return known is not False


def _name(endpoint: Endpoint) -> str:
    target = endpoint.target_ref
    if target is not None and target.kind == "Pod" and target.name:
        return target.name
    return endpoint.addresses[0].replace(":", "-") if endpoint.addresses else ""


def _host(item: Slice, endpoint: Endpoint) -> str:
    if not endpoint.addresses:
        return ""
    return f"[{endpoint.addresses[0]}]" if item.address_type == "IPv6" else endpoint.addresses[0]
