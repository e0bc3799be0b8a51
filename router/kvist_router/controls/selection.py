"""A selection as agents understand it: texts and messages become tokens, a tenant its cache salt.

The tokens are those of the prompt as it would be sent, so that a pin or a prefetch hits what requests use.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvist_router.access.salt import tenant_salt
from kvist_router.errors import Refused
from kvist_router.mind.interface import Path, Refusal
from kvist_router.mind.mind import LocalMind
from kvist_router.tokens.keys import TOKEN_BYTES
from kvist_router.tokens.request import parse

_OWN_FIELDS = ("text", "messages", "model", "tenant", "replicas")


class Selections:
    """`secret`: of tenants, None when there is none."""

    def __init__(self, mind: LocalMind, secret: bytes | None) -> None:
        self._mind = mind
        self._secret = secret

    async def resolve(self, body: dict[str, Any]) -> dict[str, Any]:
        """The body for agents; raises Refused."""
        sent = {field: value for field, value in body.items() if field not in _OWN_FIELDS}
        if "text" in body and "messages" in body:
            raise wrong("give only one of text and messages", "messages")
        if "text" in body:
            if not isinstance(body["text"], str):
                raise wrong("text must be a string", "text")
            sent["tokens"] = await self._tokens({"prompt": body["text"]}, body, "completions")
        elif "messages" in body:
            sent["tokens"] = await self._tokens({"messages": body["messages"]}, body, "chat")
        if "tenant" in body:
            if "tokens" not in sent:
                raise wrong(
                    "tenant goes with tokens, text or messages; what a quota counts has the tag tenant:NAME",
                    "tenant",
                )
            sent["salt"] = self._salt(body["tenant"])
        return sent

    async def _tokens(self, prompt: dict[str, Any], body: dict[str, Any], path: Path) -> list[int]:
        model = {"model": body["model"]} if "model" in body else {}
        request = parse(msgspec.json.encode(prompt | model), path)
        engine = next((replica for replica in self._mind.replicas.values() if replica.healthy), None)
        if engine is None:
            raise Refused(Refusal(503, "no engine is healthy: nobody can tell the tokens", code="no_replica"))
        prompts = await self._mind.source.prompts(request, engine.url)
        if len(prompts.each) != 1:
            raise Refused(Refusal(503, "the tokens of this prompt cannot be told now", code="no_tokens"))
        return unpack_tokens(prompts.each[0].packed)

    def _salt(self, tenant: object) -> str:
        if not isinstance(tenant, str):
            raise wrong("tenant must be a string", "tenant")
        if self._secret is None:
            raise wrong("tenants share the cache here: tenant.secret_file is not set", "tenant")
        return tenant_salt(self._secret, tenant)


def unpack_tokens(packed: bytes) -> list[int]:
    """The inverse of `keys.pack_tokens`."""
    return [
        int.from_bytes(packed[start : start + TOKEN_BYTES], "little")
        for start in range(0, len(packed), TOKEN_BYTES)
    ]


def wrong(message: str, field: str) -> Refused:
    """A 400 that names the field."""
    return Refused(Refusal(400, message, param=field, code="invalid_parameter"))
