"""What a relay does while the mind is gone: consistent hashing over the replicas last known as healthy.

    order of replicas = by hash(beginning of the prompt, name), descending
    chosen            = the first with requests < ceil(1.25 * (all of this relay's requests + 1) / replicas)

Prompts that begin alike go to one replica, the same from every relay and router. The rules that keep tenants
and hosts apart hold as ever (`parse`, the edits of a body); rates, turns and context lengths are the mind's
and wait for it. Called by remote.py.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from hashlib import blake2b
from os import urandom
from typing import Any

from kvist_router.access.salt import tenant_salt
from kvist_router.errors import Refused
from kvist_router.mind.eligible import nobody, unknown_model
from kvist_router.mind.interface import Decision, Known, Metadata, Refusal, Report, View
from kvist_router.mind.policies.prefix_affinity import by_hash
from kvist_router.relay.edits import edit_body
from kvist_router.tokens.request import Request, parse

PREFIX_CHARACTERS = 4096
AVOID_SECONDS = 5.0  # a replica that could not be connected to, while there is another
ROUTED_BY = "hash"
GONE = Refusal(
    503, "the router's mind cannot be reached", "service_unavailable", code="no_mind", retry_after=1
)
_FULL = Refusal(
    503,
    "the router is at its limit of requests in flight",
    "service_unavailable",
    code="overloaded",
    retry_after=1,
)


class HashMind:
    """`interface.Mind` by hash. `view` is the mind's last; `most` requests of this relay at once."""

    def __init__(self, secret: bytes | None, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.view: View | None = None
        self._secret = secret
        self._most = most
        self._clock = clock
        self._under_way: dict[str, str] = {}  # replica by request id
        self._counts: Counter[str] = Counter()  # of these
        self._avoided: dict[str, float] = {}

    async def decide(self, body: bytes, metadata: Metadata) -> Decision | Refusal:
        """See interface.Mind."""
        try:
            return self._decide(body, metadata)
        except Refused as refused:
            return refused.refusal

    async def report(self, request_id: str, report: Report) -> None:
        """See interface.Mind."""
        if report.event == "first_byte" or request_id not in self._under_way:
            return
        replica = self._under_way.pop(request_id)
        self._counts -= Counter([replica])  # without those at none
        if report.unreachable:
            self._avoided[replica] = self._clock() + AVOID_SECONDS

    def knows(self, request_id: str) -> bool:
        """Whether this decision was made here and has not ended."""
        return request_id in self._under_way

    def _decide(self, body: bytes, metadata: Metadata) -> Decision:
        # Which engine keeps a stored response only the mind finds out.
        if self.view is None or metadata.path == "stored":
            raise Refused(GONE)
        request = parse(body, metadata.path, separated=self._secret is not None)
        if request.response:
            raise Refused(GONE)
        if len(self._under_way) >= self._most:
            raise Refused(_FULL)
        chosen = self._choose(request, metadata, self.view)
        request_id = metadata.id or urandom(16).hex()
        self._under_way[request_id] = chosen.name
        self._counts[chosen.name] += 1
        return Decision(
            id=request_id,
            replica=chosen.name,
            url=chosen.url,
            predicted_tokens=0,
            prompt_tokens=0,
            stream=request.stream,
            body=self._edited(body, request, metadata),
            routed_by=ROUTED_BY,
        )

    def _choose(self, request: Request, metadata: Metadata, view: View) -> Known:
        if request.model is not None and request.model not in view.models:
            raise Refused(unknown_model(request.model, sorted(view.models)))
        serving = {
            item.name: item
            for item in view.replicas
            if item.name not in metadata.exclude and request.model in (None, *item.models)
        }
        if not serving:
            raise Refused(
                nobody("no healthy replica serves this model, as far as a router without mind knows")
            )
        now = self._clock()
        self._avoided = {name: until for name, until in self._avoided.items() if until > now}
        left = serving.keys() - self._avoided.keys() or serving.keys()
        requests = {name: self._counts[name] for name in left}
        return serving[by_hash(_prefix(request, metadata.tenant), requests)[1]]

    def _edited(self, body: bytes, request: Request, metadata: Metadata) -> bytes | None:
        if request.path == "tokens":
            return None
        salt = None if self._secret is None else tenant_salt(self._secret, metadata.tenant)
        return edit_body(body, request.tags, salt)


def _prefix(request: Request, tenant: str) -> bytes:
    """A key equal for prompts that begin alike."""
    digest, left = blake2b(tenant.encode("utf-8", "surrogatepass"), digest_size=16), PREFIX_CHARACTERS
    for text in _texts(request):
        digest.update(text[:left].encode("utf-8", "surrogatepass"))
        left -= len(text)
        if left <= 0:
            break
    return digest.digest()


def _texts(request: Request) -> Iterator[str]:
    fields = request.fields
    name = {"chat": "messages", "completions": "prompt"}.get(request.path, "input")
    prompt = fields.get(name, fields.get("messages", fields.get("prompt")))
    for item in prompt if isinstance(prompt, list) else [prompt]:
        content = item.get("content") if isinstance(item, dict) else item
        yield content if isinstance(content, str) else _json(content)


def _json(value: Any) -> str:
    """Contents in parts, tokens and the like; their text need not be anybody's JSON."""
    try:
        return json.dumps(value) if value is not None else ""
    except RecursionError:  # nested deeper than it can be written: the engine refuses it
        return ""
