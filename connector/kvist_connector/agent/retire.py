"""The control that takes authority from cached state: persisted, purged, fenced, told to engines.

    rule added -> files written -> known to all parts -> chunks leave every tier -> engines told
        -> said in shared tiers -> answer

After the second step a crash changes nothing: every part asks `Authority` when it admits a chunk. Chunks
that others stored in a shared tier are refused when they are read, and deleted then.
Called by http.py; all on the agent's loop, files are written in a thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Mapping
from typing import Any

import msgspec

from kvist_connector.agent.core import Core
from kvist_connector.agent.lower import LowerTier
from kvist_connector.agent.own import OwnTier
from kvist_connector.agent.pins import Pins
from kvist_connector.agent.retired_file import RetiredFile
from kvist_connector.agent.selection import (
    RequestError,
    Selector,
    parse_key,
    token_keys,
    typed,
    with_descendants,
)
from kvist_connector.agent.shared import SharedTier
from kvist_connector.errors import StorageFull, TierError
from kvist_connector.names import TAG_LORA
from kvist_connector.protocol.retired import AHEAD, FARTHEST, MAX_RULE_BYTES, MAX_RULES, Epoch, Kind, Retired
from kvist_connector.protocol.tiers import Tier

# Seconds that an answer waits for deletions; what is not deleted then is not served either.
_DELETING = 10.0
# Chunks that make room for a rule on a full disk; what is being stored may take it first.
_TRIES = 8
# Seconds for a shared tier to take a rule; later it is told all the same.
_TELLING = 5.0


class RetireBody(Selector, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Body of retire: one of tag, tokens, keys (one), lora, revision. `epoch`: 0 chooses one."""

    revision: str | None = None
    epoch: Epoch = 0
    dry_run: bool = False


class RetiredBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Body of retired: what another agent or a router knows."""

    retired: Retired


class Retire:
    """Of one agent. `file`: None keeps nothing over a restart (tests of other parts)."""

    def __init__(
        self, core: Core, lower: Mapping[Tier, LowerTier], pins: Pins, file: RetiredFile | None
    ) -> None:
        self._core = core
        self._lower = lower
        self._pins = pins
        self._file = file
        self._turn = asyncio.Lock()
        self._under_way: set[asyncio.Task[dict[str, Any]]] = set()

    @property
    def known(self) -> Retired:
        """What this agent knows to be retired."""
        return self._core.authority.known

    async def retire(self, body: dict[str, Any]) -> dict[str, Any]:
        """One rule. Raises TierError when it could not be made durable: then nothing has changed."""
        asked = typed(body, RetireBody)
        kind, value = self._rule(asked)
        if len(msgspec.json.encode(value)) > MAX_RULE_BYTES:
            raise RequestError(f"longer than {MAX_RULE_BYTES} bytes: no request carries that", kind)
        if asked.epoch > max(_now(), self.known.epoch) + AHEAD:
            raise _far(asked.epoch, "epoch")

        async def take() -> dict[str, Any]:
            async with self._turn:
                epoch = asked.epoch or max(_now(), self.known.epoch + 1)
                wanted = self.known.with_rule(kind, value, epoch)
                answer = await self._take(wanted, asked.dry_run) | {"rule": {f"{kind}:{value}": epoch}}
            return answer if asked.dry_run else await self._published(answer)

        return await self._to_the_end(take()) | {"dry_run": asked.dry_run}

    async def merge(self, body: dict[str, Any]) -> dict[str, Any]:
        """What others know; `changed`: whether any of it was new. Raises TierError."""
        given = typed(body, RetiredBody).retired
        if len(given.rules) > MAX_RULES or any(epoch > given.epoch for epoch in given.rules.values()):
            raise RequestError(f"at most {MAX_RULES} rules, none of a later epoch than `epoch`", "retired")
        # Not measured by our clock: what others took with a clock that was wrong has to be known here, too.
        if max(given.epoch, given.floor) >= FARTHEST:
            raise _far(max(given.epoch, given.floor), "retired")

        async def take() -> dict[str, Any]:
            async with self._turn:
                before = self.known
                answer = await self._take(before.merge(given), dry_run=False)
            if before != self.known:
                # Not waited for: whoever asks sends no request here meanwhile.
                self._owe()
            return answer | {"changed": before != self.known}

        return await self._to_the_end(take()) | {"retired": self.known}

    async def learn(self, found: Retired) -> None:
        """What a shared tier says; the other tiers hear of it. Raises TierError."""

        async def take() -> dict[str, Any]:
            async with self._turn:
                return await self._take(self.known.merge(found), dry_run=False)

        await self._to_the_end(take())
        self._owe()

    async def _to_the_end(self, work: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
        """Whatever becomes of the caller: a rule that is being written to its file comes into force."""
        task = asyncio.get_running_loop().create_task(work)
        self._under_way.add(task)
        task.add_done_callback(self._done)
        return await asyncio.shield(task)

    def _done(self, task: asyncio.Task[dict[str, Any]]) -> None:
        self._under_way.discard(task)
        if not task.cancelled():
            task.exception()  # told to the caller, if there still is one

    async def _take(self, wanted: Retired, dry_run: bool) -> dict[str, Any]:
        core = self._core
        before = core.authority.known
        if not dry_run and wanted != before and self._file is not None:
            await self._keep(self._file, wanted)
        if not dry_run:
            core.authority.known = wanted
        doomed = [] if wanted == before else self._doomed(wanted)
        sizes = [core.catalog.index(tier).get(key) for key in doomed for tier in core.catalog.tiers_of(key)]
        if doomed:
            core.memory.settle_fresh()  # what is kept because it is new is in nobody's use
        present = [chunk for key in doomed if (chunk := core.catalog.resident(key)) is not None]
        leased = sum(core.catalog.is_leased(chunk) for chunk in present)
        if not dry_run and wanted != before:
            self._purge(doomed)
            core.tell_retired()
            core.room_changed()
            await self._deleted()
        layout = core.memory.layout
        return {
            "epoch": wanted.epoch,
            "complete": bool(core.schedulers) or not core.sessions,
            "chunks": len(doomed),
            "tokens": len(doomed) * (layout.chunk_tokens if layout is not None else 0),
            "bytes": sum(node.size for node in sizes if node is not None),
            "leased": leased,
        }

    async def _keep(self, file: RetiredFile, wanted: Retired) -> None:
        """Make it durable: in a disk full of chunks they make room for it. Raises TierError."""
        disk = self._lower.get(Tier.DISK)
        tries = _TRIES
        while True:
            try:
                await asyncio.get_running_loop().run_in_executor(None, file.write, wanted)
                return
            except StorageFull as error:
                tries -= 1
                if not (tries and isinstance(disk, OwnTier) and await disk.give_room()):
                    raise TierError(str(error)) from error

    def _doomed(self, known: Retired) -> list[bytes]:
        """What that retires and what hangs on it, parents first."""
        retires = self._core.authority.knowing(known).retires
        found = [
            c.key for c in self._core.catalog.chunks() if retires(c.key, c.parent, c.index, c.epoch, c.tags)
        ]
        return with_descendants(self._core.catalog, found) if found else []

    def _purge(self, keys: list[bytes]) -> None:
        """In one turn of the loop: nothing is committed or looked up in between."""
        core = self._core
        core.memory.settle_fresh()
        self._pins.unpin(keys)
        for key in reversed(keys):
            chunk = core.catalog.get(key)
            below = sorted(chunk.below) if chunk is not None else []
            if chunk is not None and chunk.ref is not None:
                core.memory.drop(chunk)
            for tier in below:
                self._lower[tier].drop(key)

    async def _deleted(self) -> None:
        try:
            async with asyncio.timeout(_DELETING):
                for lower in self._lower.values():
                    await lower.settled()
        except TimeoutError:
            self._core.counts["retire_deletions_late"] += 1

    async def _published(self, answer: dict[str, Any]) -> dict[str, Any]:
        """With the tiers that do not say it yet to agents which come there: then it is not complete."""

        async def publish(lower: SharedTier) -> bool:
            try:
                async with asyncio.timeout(_TELLING):
                    return await lower.publish()
            except TimeoutError:
                lower.owes_rules()
                return False

        done = await asyncio.gather(*(publish(lower) for lower in self._shared))
        left = [lower.tier.label for lower, said in zip(self._shared, done, strict=True) if not said]
        return answer | {"unpublished": left, "complete": answer["complete"] and not left}

    def _owe(self) -> None:
        for lower in self._shared:
            lower.owes_rules()

    @property
    def _shared(self) -> list[SharedTier]:
        return [lower for lower in self._lower.values() if isinstance(lower, SharedTier)]

    def _rule(self, asked: RetireBody) -> tuple[Kind, str]:
        ways = {
            "tag": asked.tag is not None,
            "tokens": asked.tokens is not None,
            "keys": asked.keys is not None,
            "revision": asked.revision is not None,
            "lora": bool(asked.lora) and asked.tokens is None,
        }
        used = [name for name, given in ways.items() if given]
        if len(used) != 1 or asked.all or asked.text is not None or asked.messages is not None:
            raise RequestError("give one of tag, tokens, keys, lora, revision", used[1] if used[1:] else None)
        match used[0]:
            case "tag":
                return "tag", asked.tag or ""
            case "revision":
                return "revision", asked.revision or ""
            case "lora":
                return "tag", lora_tag(asked.lora, asked.lora_revision)
            case _:
                return "prefix", self._prefix(asked)

    def _prefix(self, asked: RetireBody) -> str:
        if asked.keys is not None:
            if len(asked.keys) != 1:
                raise RequestError("give one key, that of the prefix's last chunk", "keys")
            return parse_key(asked.keys[0]).hex()
        layout = self._core.memory.layout
        if layout is None:
            raise TierError("no engine has registered yet: its fingerprint is part of every key")
        keys = token_keys(asked, layout)
        if not keys:
            raise RequestError(f"a prefix has at least one chunk of {layout.chunk_tokens} tokens", "tokens")
        return keys[-1].hex()


def _now() -> int:
    return int(time.time() * 1000)


def _far(epoch: int, field: str) -> RequestError:
    return RequestError(f"epoch {epoch} is more than a year ahead: epochs are milliseconds since 1970", field)


def lora_tag(name: str, revision: str = "") -> str:
    """The tag of an adapter, of one revision if one is given."""
    return f"{TAG_LORA}{name}@{revision}" if revision else f"{TAG_LORA}{name}"
