"""Questions to programs of a cluster over HTTP: routers' views, agents' drains and tiers.

Every question has one short deadline, and no answer is `NoAnswer`: the caller goes on without.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final, Protocol

import aiohttp

from kvist_connector import names
from kvist_connector.protocol.tiers import SHARED_TIERS
from kvist_operator.control.errors import NoAnswer
from kvist_operator.control.pods import Pod
from kvist_operator.control.views import RouterView, router_view

SHARED: Final = tuple(tier.label for tier in SHARED_TIERS)


class Programs(Protocol):
    """What the operator asks of running pods."""

    async def router(self, pod: Pod) -> RouterView:
        """The view of one router; raises NoAnswer."""
        ...

    async def drain(self, pod: Pod, token: str, *, undo: bool = False) -> bool:
        """Begin or take back the drain of an engine; True when nothing is left. Raises NoAnswer."""
        ...

    async def tiers(self, pod: Pod, token: str) -> dict[str, str]:
        """Shared tiers of an engine: name -> why its last operation failed, else "". Raises NoAnswer."""
        ...

    async def clear(self, pod: Pod, token: str, seconds: float, *, shared: bool) -> dict[str, int]:
        """Clear an agent's shared tiers, or those of its own; chunks removed by tier. Raises NoAnswer."""
        ...


class HttpPrograms:
    """`session` is the caller's."""

    def __init__(self, session: aiohttp.ClientSession, deadline: float = 3.0) -> None:
        self._session = session
        self._deadline = deadline

    async def router(self, pod: Pod) -> RouterView:
        """As Programs."""
        base = _base(pod, "router-admin", names.PORT_ROUTER_ADMIN)
        replicas = await self._ask("GET", base + names.PATH_REPLICAS)
        metrics = await self._ask("GET", base + names.PATH_METRICS, as_text=True)
        return router_view(replicas, metrics)

    async def drain(self, pod: Pod, token: str, *, undo: bool = False) -> bool:
        """As Programs."""
        url = _base(pod, "agent", names.PORT_AGENT) + names.PATH_DRAIN
        left = await self._ask("POST", url, _bearer(token), {"deadline": 0.0, "undo": undo})
        if not isinstance(left, dict):
            raise NoAnswer(f"{pod.name}: its answer is not that of an agent")
        return not (left.get("routers") or left.get("requests") or left.get("chunks"))

    async def tiers(self, pod: Pod, token: str) -> dict[str, str]:
        """As Programs."""
        url = _base(pod, "agent", names.PORT_AGENT) + names.PATH_STATS
        stats = await self._ask("GET", url, _bearer(token))
        try:
            found = {tier: stats["tiers"].get(tier) for tier in SHARED}
            return {tier: str(item["problem"]) for tier, item in found.items() if item is not None}
        except (KeyError, TypeError, AttributeError) as error:
            raise NoAnswer(f"{pod.name}: its answer is not that of an agent") from error

    async def clear(self, pod: Pod, token: str, seconds: float, *, shared: bool) -> dict[str, int]:
        """As Programs. Which chunks a shared tier has for it an agent knows only from its engine."""
        base = _base(pod, "agent", names.PORT_AGENT)
        stats = await self._ask("GET", base + names.PATH_STATS, _bearer(token))
        try:
            known, tiers = (
                stats["fingerprint"],
                [tier for tier in stats["tiers"] if (tier in SHARED) == shared],
            )
        except (KeyError, TypeError) as error:
            raise NoAnswer(f"{pod.name}: its answer is not that of an agent") from error
        if shared and not known:
            raise NoAnswer(f"{pod.name}: its agent has not met its engine, so it does not know the chunks")
        removed = {}
        for tier in tiers:
            url = base + names.PATH_CLEAR
            answer = await self._ask("POST", url, _bearer(token), {"tier": tier}, seconds=seconds)
            removed[tier] = int(answer["chunks"])
        return removed

    async def _ask(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str] | None = None,
        body: object = None,
        as_text: bool = False,
        seconds: float | None = None,
    ) -> Any:
        deadline = self._deadline if seconds is None else seconds
        try:
            async with (
                asyncio.timeout(deadline),
                # As the kubelet does: who is asked is known by its address, which no certificate has.
                self._session.request(method, url, headers=headers, json=body, ssl=False) as answer,
            ):
                if answer.status != 200:
                    raise NoAnswer(f"{method} {url}: HTTP {answer.status}")
                return await answer.text() if as_text else await answer.json()
        except (aiohttp.ClientError, OSError, ValueError) as error:
            reason = f"no answer within {deadline:g} s" if isinstance(error, TimeoutError) else str(error)
            raise NoAnswer(f"{method} {url}: {reason or type(error).__name__}") from error


def _bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"} if token else {}


def _base(pod: Pod, port: str, otherwise: int) -> str:
    if not pod.address:
        raise NoAnswer(f"{pod.name} has no address yet")
    host = f"[{pod.address}]" if ":" in pod.address else pod.address
    scheme = "https" if port in pod.tls else "http"
    return f"{scheme}://{host}:{pod.port(port, otherwise)}"
