"""An agent's parts in this process, behind a real socket, over a tier that fails or stalls when told to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from obstore.store import MemoryStore

from kvist_connector.agent.arena_file import ArenaFile
from kvist_connector.agent.engine_server import EngineServer
from kvist_connector.agent.parts import Opened, Parts, build
from kvist_connector.agent.retired_file import RetiredFile
from kvist_connector.agent.settings import AgentSettings
from kvist_connector.agent.supervise import Supervisor
from kvist_connector.protocol import engine as wire
from kvist_connector.protocol.tiers import Tier
from kvist_connector.testing.fake_engine import FakeEngine, prompt_keys
from kvist_connector.testing.patience import SECONDS, patient
from kvist_connector.tiers.disk import DiskStore
from kvist_connector.tiers.envelope import EnvelopeStore
from kvist_connector.tiers.faulty import FaultyStore
from kvist_connector.tiers.object_store import ObjectStore

DEADLINE = 20.0


class AgentParts:
    """`faulty` is its one lower tier; `start` and `stop` it."""

    def __init__(
        self,
        parts: Parts,
        faulty: FaultyStore,
        supervisor: Supervisor,
        server: EngineServer,
        socket: Path,
        threads: ThreadPoolExecutor,
        arena: ArenaFile,
    ) -> None:
        self.parts = parts
        self._arena = arena
        self.faulty = faulty
        self.supervisor = supervisor
        self.socket = socket
        self._server = server
        self._threads = threads

    @classmethod
    async def over_disk(
        cls,
        folder: Path,
        disk_size: int = 10 << 20,
        limits: Mapping[str, int] = MappingProxyType({}),
        **settings: Any,
    ) -> Self:
        """Its files are in the folder, where it finds those of an agent before; `settings` are more."""
        threads = ThreadPoolExecutor(2)
        faulty = FaultyStore(await DiskStore.open(folder / "disk", disk_size, "none", threads))
        more = {"disk": {"path": folder / "disk", "size": disk_size}} | settings
        return await cls.start(_settings(folder, more), Tier.DISK, faulty, threads, **limits)

    @classmethod
    async def over_bucket(
        cls,
        folder: Path,
        backend: MemoryStore,
        lookup_deadline: float = SECONDS,
        **settings: Any,
    ) -> Self:
        """One of several that share the backend; `settings` are more."""
        threads = ThreadPoolExecutor(2)
        faulty = FaultyStore(ObjectStore(backend, "memory", threads))
        more = {"object_store": {"url": "s3://bucket", "lookup_deadline": lookup_deadline}} | settings
        return await cls.start(_settings(folder, more), Tier.OBJECT, faulty, threads)

    @classmethod
    async def start(
        cls,
        settings: AgentSettings,
        tier: Tier,
        faulty: FaultyStore,
        threads: ThreadPoolExecutor,
        **limits: int,
    ) -> Self:
        """`threads` are taken over; `limits` are those of parts.build."""
        arena = ArenaFile.reserve(settings.arena, settings.memory)
        supervisor = Supervisor()
        file = RetiredFile(settings.arena, settings.disk.path, lambda: 1)
        opened = Opened(arena, {tier: EnvelopeStore(faulty, threads)}, file.read(), file)
        parts = build(settings, opened, supervisor, 1, lambda: None, **limits)
        parts.memory.resume(parts.core.epoch, parts.members.living())
        for lower in parts.lower.values():
            await lower.scan()
        if parts.memory.layout is not None:
            parts.core.hooks.layout(parts.memory.layout)
        parts.members.settle()
        supervisor.daemon("write-behind", parts.writebehind.run())
        if parts.exclusive is not None:
            supervisor.daemon("placement", parts.exclusive.run())
        server = EngineServer(settings.socket, parts.session)
        server.claim()
        await server.start()
        return cls(parts, faulty, supervisor, server, settings.socket, threads, arena)

    async def written(self) -> None:
        """Everything is in the lower tier."""
        assert await self.parts.writebehind.flush(DEADLINE)

    async def clear_memory(self) -> None:
        """Everything is in the lower tier only."""
        await self.written()
        await self.parts.controls.edits.clear({"tier": "memory"})

    def check(self) -> None:
        """The books agree and nothing has failed."""
        self.parts.memory.check_integrity()
        assert not self.supervisor.failed

    async def stop(self) -> None:
        """End everything; what was held up goes on first."""
        self.faulty.gate.set()
        await self._server.close()
        await self.supervisor.close()
        self.parts.feed.close()
        self.parts.pins.close()
        self.parts.members.close()
        for lower in self.parts.lower.values():
            await lower.close()
        self.parts.memory.close()
        self._arena.give_up()
        self._threads.shutdown()


def _settings(folder: Path, more: Mapping[str, Any]) -> AgentSettings:
    folder.mkdir(exist_ok=True)
    given = {"replica": "r", "socket": folder / "s", "arena": folder / "arena", "memory": 1 << 20}
    return AgentSettings(**patient(given | dict(more)))


def keys_of(chunks: int, first: int = 0) -> list[bytes]:
    """Keys of the first chunks of the prompt that begins with the token `first`."""
    return prompt_keys(range(first, first + 8 * chunks))


def ask(engine: FakeEngine, chain: Iterable[bytes], request: str = "r", local_tokens: int = 0) -> None:
    """Send a lookup; `answer` has what comes back."""
    keys = list(chain)
    engine.scheduler.send(
        wire.Lookup(request=request, keys=b"".join(keys), tokens=8 * len(keys), local_tokens=local_tokens)
    )


async def answer(engine: FakeEngine, request: str = "r", pending: bool = False) -> wire.Answer:
    """The next answer to a request."""
    return await engine.scheduler.expect(
        wire.Answer, lambda found: found.request == request and found.pending is pending
    )
