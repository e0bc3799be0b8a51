"""What the programs themselves say about a replay: the router's records, the agents' counters.

Called by the replay and the restarts. Every wait has a deadline; a record that does not come is
None, since a demo can go on without it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx

from kvist_cli.demo.errors import DemoError
from kvist_cli.demo.figures import STORED_TIERS, Traffic
from kvist_connector import names
from kvist_connector.keys import CHUNK_TOKENS
from kvist_connector.quantity import counted

T = TypeVar("T")

RECORD_SECONDS = 5.0
ROUTABLE_SECONDS = 120.0
FLUSH_SECONDS = 60.0
PAUSE_SECONDS = 0.05


@dataclass(frozen=True)
class Outcome:
    """What the connector reported of one request: reused tokens by tier label, seconds of copying."""

    hits: Mapping[str, int]
    load_seconds: float


def outcome(
    client: httpx.Client, admin: str, request_id: str, seconds: float = RECORD_SECONDS
) -> Outcome | None:
    """The router's record of a request, once the engine's own report has joined it."""

    def look() -> Outcome | None:
        response = client.get(f"{admin}{names.PATH_DECISIONS}/{request_id}")
        actual = response.json().get("actual") if response.status_code == httpx.codes.OK else None
        return Outcome(actual["hit_tokens"], actual["load_seconds"]) if actual else None

    return _until(look, seconds)


def traffic(client: httpx.Client, agents: Mapping[str, str]) -> Traffic:
    """Bytes stored and loaded so far, summed over the agents."""
    total = Traffic()
    for base in agents.values():
        total = total.plus(traffic_of(_json(client.get(f"{base}{names.PATH_STATS}"))))
    return total


def traffic_of(stats: Mapping[str, Any]) -> Traffic:
    """The bytes in one agent's answer; what engines loaded from the arena follows from their own records."""
    counters, chunk = stats["counters"], stats["chunk_bytes"]
    stored = {"memory": counters.get("commits_accepted", 0) * chunk}
    loaded = {"memory": counters.get("hit_tokens_memory", 0) * chunk // CHUNK_TOKENS}
    for tier in STORED_TIERS[1:]:
        stored[tier] = counters.get(f"bytes_stored_{tier}", 0)
        loaded[tier] = counters.get(f"bytes_loaded_{tier}", 0)
    return Traffic(stored, loaded)


@dataclass(frozen=True)
class Hits:
    """Requests that an agent has records of, and their reused tokens by tier."""

    requests: int
    tokens: Mapping[str, int]

    def since(self, before: Hits) -> dict[str, int]:
        """Tokens of the requests after `before`, by tier; tiers without any are left out."""
        return {tier: n for tier, total in self.tokens.items() if (n := total - before.tokens[tier])}


def hits(client: httpx.Client, agent: str) -> Hits:
    """What the engine has reported so far."""
    counters = _json(client.get(f"{agent}{names.PATH_STATS}"))["counters"]
    tokens = {tier: counters.get(f"hit_tokens_{tier}", 0) for tier in ("gpu", *STORED_TIERS)}
    return Hits(counters.get("requests", 0), tokens)


def next_hits(client: httpx.Client, agent: str, before: Hits) -> dict[str, int]:
    """Reused tokens of the request after `before`, once the engine reported it."""

    def look() -> Hits | None:
        now = hits(client, agent)
        return now if now.requests > before.requests else None

    found = _until(look, RECORD_SECONDS)
    if found is None:
        raise DemoError(
            f"the engine reported no record of a request to {agent} within {RECORD_SECONDS:.0f} s"
        )
    return found.since(before)


def wait_routable(client: httpx.Client, admin: str, wanted: Collection[str], *, mirrored: bool) -> None:
    """Wait until the router sends requests to all `wanted` replicas, and knows what they hold if `mirrored`.

    A router answers before it has read every feed; what it does not know yet it cannot route by.
    """

    def look() -> bool | None:
        replicas = _json(client.get(f"{admin}{names.PATH_REPLICAS}"))["replicas"]
        good = {item["name"] for item in replicas if item["healthy"] and (known(item) or not mirrored)}
        return good.issuperset(wanted) or None

    def known(item: Mapping[str, Any]) -> bool:
        return bool(item["mirrored"] and item["feed"]["engine_connected"])

    if _until(look, ROUTABLE_SECONDS) is None:
        listed = ", ".join(sorted(wanted))
        raise DemoError(f"the router did not take {listed} into use within {ROUTABLE_SECONDS:.0f} s")


def flush(client: httpx.Client, agent: str) -> None:
    """Wait until everything that the agent holds is on disk too."""
    answer = post(client, f"{agent}{names.PATH_FLUSH}", {"deadline": FLUSH_SECONDS})
    if answer.get("pending_chunks"):
        left = counted(answer["pending_chunks"], "chunk")
        raise DemoError(f"not on disk after {FLUSH_SECONDS:.0f} s: {left}")


def clear_memory(client: httpx.Client, agent: str) -> None:
    """Empty the memory tier, so that the next hit comes from below."""
    post(client, f"{agent}{names.PATH_CLEAR}", {"tier": "memory"})


def post(client: httpx.Client, url: str, body: Any) -> dict[str, Any]:
    """A JSON answer ({} for an empty one); raises DemoError with the server's words."""
    return _json(client.post(url, json=body))


def _until(look: Callable[[], T | None], seconds: float) -> T | None:
    ends = time.monotonic() + seconds
    while (found := look()) is None and time.monotonic() < ends:
        time.sleep(PAUSE_SECONDS)
    return found


def _json(response: httpx.Response) -> dict[str, Any]:
    if response.is_error:
        raise DemoError(f"{response.request.url} answered {response.status_code}: {response.text[:300]}")
    answer: dict[str, Any] = response.json() if response.content else {}
    return answer
