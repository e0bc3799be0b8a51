"""The agent's parts, wired together. No I/O: arena and disk are opened before and given in."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kvist_connector.agent.arena_file import ArenaFile
from kvist_connector.agent.authority import Authority
from kvist_connector.agent.busy import Busy
from kvist_connector.agent.catalog import Catalog, Chunk
from kvist_connector.agent.controls import Controls
from kvist_connector.agent.core import Core, Hooks
from kvist_connector.agent.deletion_log import DeletionLog
from kvist_connector.agent.drain import Drain
from kvist_connector.agent.edits import Edits
from kvist_connector.agent.exclusive import Exclusive
from kvist_connector.agent.feed import Feed, View
from kvist_connector.agent.finder import Finder
from kvist_connector.agent.gpu_events import GpuEvents
from kvist_connector.agent.gpu_index import GpuIndex
from kvist_connector.agent.grants import Grants
from kvist_connector.agent.handover import Handover
from kvist_connector.agent.journal import Journal
from kvist_connector.agent.layouts import announced, is_lossy, unroundable
from kvist_connector.agent.leases import LeaseBook
from kvist_connector.agent.loads import Loader
from kvist_connector.agent.lower import LowerTier
from kvist_connector.agent.members import Members
from kvist_connector.agent.memory import MemoryTier
from kvist_connector.agent.own import OwnTier
from kvist_connector.agent.parting import Parting
from kvist_connector.agent.peer_stores import Peers
from kvist_connector.agent.peers import PeerTier
from kvist_connector.agent.pins import Pins
from kvist_connector.agent.quota import Quotas
from kvist_connector.agent.retire import Retire
from kvist_connector.agent.retired_file import RetiredFile
from kvist_connector.agent.roster import Roster
from kvist_connector.agent.session import Session
from kvist_connector.agent.settings import AgentSettings
from kvist_connector.agent.shared import SharedTier
from kvist_connector.agent.supervise import Supervisor
from kvist_connector.agent.totals import Totals
from kvist_connector.agent.writebehind import WriteBehind
from kvist_connector.eviction import Learned
from kvist_connector.planner import PrefillModel
from kvist_connector.protocol.engine import EngineLoad, Layout, RequestRecord
from kvist_connector.protocol.feed import FEED_VERSION, Opening, TierSpeed
from kvist_connector.protocol.retired import Retired
from kvist_connector.protocol.tiers import Tier, preferred
from kvist_connector.tiers.anyone import AnyoneStore
from kvist_connector.tiers.envelope import EnvelopeStore
from kvist_connector.tiers.wrapper import innermost

# Before an engine has measured its prefill only the ratio between positions matters.
_PREFILL_PRIOR = PrefillModel(linear=1e-4, quadratic=1e-9)
# Chunks waiting for a lower tier stay in the arena; this bounds how far each may fall behind.
_WRITE_BEHIND_BYTES = 4 * 1024**3
# A reload is never quite free: it keeps chunks that are stored below in a sensible order too.
_LEAST_SHARE = 0.05


@dataclass(frozen=True)
class Parts:
    """Everything that `Agent` starts, serves and stops."""

    core: Core
    memory: MemoryTier
    catalog: Catalog
    lower: dict[Tier, LowerTier]
    loader: Loader
    writebehind: WriteBehind
    members: Members
    gpu: GpuIndex
    events: GpuEvents | None
    feed: Feed
    totals: Totals
    controls: Controls
    pins: Pins
    busy: Busy
    exclusive: Exclusive | None = None  # of placement exclusive: `run` it

    def session(self) -> Session:
        """A fresh connection's server side."""
        return Session(self.core, LeaseBook(self.memory.hold, self.memory.let_go), Grants(self.memory))


@dataclass(frozen=True)
class Opened:
    """What was taken from the machine; without an arena it is None."""

    arena: ArenaFile | None
    stores: Mapping[Tier, EnvelopeStore]  # of the lower tiers, preferred first
    retired: Retired = field(default_factory=Retired)
    retired_file: RetiredFile | None = None
    peers: Peers | None = None
    learned: Mapping[Tier, Learned] = field(default_factory=dict)  # by the eviction of an earlier agent


def build(
    settings: AgentSettings,
    opened: Opened,
    supervisor: Supervisor,
    now_ms: int,
    connections_changed: Callable[[], None],
    write_behind_bytes: int = _WRITE_BEHIND_BYTES,
) -> Parts:
    """Wire an agent. Nothing runs yet. `now_ms` is Unix time, the floor of the epoch."""
    clock = time.monotonic
    busy = Busy()
    catalog = Catalog(settings.eviction, opened.stores, opened.learned)
    memory = MemoryTier(opened.arena, Journal(settings.arena), catalog, clock)
    memory.authority = Authority(opened.retired)
    memory.authority.parent_of = catalog.parent_of
    lower = _lower(settings, opened.stores, memory, catalog, busy)
    for tier in lower.values():
        tier.authority = memory.authority
    finder = Finder(catalog, lower)
    loader = Loader(memory, catalog, lower, finder, settings.lookup_deadline, clock, supervisor.spawn)
    written = {
        tier: lower[tier] for tier, store in opened.stores.items() if store.inner.capabilities.writable
    }
    deferred = [Tier.DISK] if settings.placement == "exclusive" else []
    writebehind = WriteBehind(memory, catalog, written, write_behind_bytes, deferred)
    memory.on_late_tags = writebehind.late_tags
    exclusive = _exclusive(memory, catalog, lower[Tier.DISK], loader, writebehind) if deferred else None
    members = Members(settings.arena, memory)
    epoch = max(now_ms, memory.previous_epoch() + 1)
    own = {tier: found for tier, found in lower.items() if isinstance(found, OwnTier)}
    quotas = Quotas(memory, catalog, own, clock)
    core = Core(memory, catalog, loader, members, epoch, busy.idle, quotas)
    core.unstorable = lambda layout: unroundable(layout, settings.lossy) or _too_large(layout, lower)
    core.announced = lambda layout: announced(layout, bool(settings.lossy))
    memory.keeps = lambda layout: is_lossy(layout) == bool(settings.lossy)
    catalog.weigh_by(_weigher(core, lower))
    gpu, feed = _index_and_feed(settings, core, lower)
    events = GpuEvents(settings.kv_events, settings.kv_events_replay, gpu) if settings.kv_events else None
    totals = Totals()
    peers = opened.peers or Peers(settings.peer, Roster(settings.peer), None)
    parting = Parting(core, lambda: peers.roster.addresses, peers.connect, settings.peer.address)
    drain = Drain(core, feed, writebehind, parting, lambda: gpu.known)
    feed.on_reader = drain.reader_changed
    pins = Pins(catalog, clock, lambda: memory.slots.size if memory.slots is not None else 0)
    catalog.is_pinned = pins.holds
    core.hooks = _hooks(core, lower, writebehind, gpu, events, feed, totals, drain, pins, connections_changed)
    if exclusive is not None:
        core.hooks.committed = _committed(writebehind, exclusive)
    catalog.on_change = _told(feed)
    members.on_free = core.room_changed
    retire = Retire(core, lower, pins, opened.retired_file)
    for tier in lower.values():
        if isinstance(tier, SharedTier):
            tier.learn = retire.learn
    handover = Handover(core, lower, Edits(core, lower, pins), lambda: peers.roster.addresses)
    controls = Controls(core, lower, writebehind, gpu, totals, drain, pins, retire, handover)
    return Parts(
        core,
        memory,
        catalog,
        lower,
        loader,
        writebehind,
        members,
        gpu,
        events,
        feed,
        totals,
        controls,
        pins,
        busy,
        exclusive,
    )


def _exclusive(
    memory: MemoryTier, catalog: Catalog, disk: LowerTier, loader: Loader, writebehind: WriteBehind
) -> Exclusive:
    exclusive = Exclusive(memory, catalog, disk, writebehind.counts)
    memory.on_evicted = exclusive.evicted
    loader.make_room, loader.promoted = exclusive.make_room, exclusive.promoted
    return exclusive


def _committed(writebehind: WriteBehind, exclusive: Exclusive) -> Callable[[bytes], None]:
    def committed(key: bytes) -> None:
        writebehind.add(key)
        exclusive.changed()

    return committed


def _lower(
    settings: AgentSettings,
    stores: Mapping[Tier, EnvelopeStore],
    memory: MemoryTier,
    catalog: Catalog,
    busy: Busy,
) -> dict[Tier, LowerTier]:
    lookup = {
        Tier.REDIS: settings.redis.lookup_deadline,
        Tier.OBJECT: settings.object_store.lookup_deadline,
    }
    found: dict[Tier, LowerTier] = {}
    for tier, store in stores.items():
        peers = innermost(store.inner)
        if isinstance(peers, AnyoneStore):
            found[tier] = PeerTier(
                store,
                peers,
                catalog,
                busy,
                time.monotonic,
                lambda: memory.chunk_bytes,
                settings.peer.lookup_deadline,
                bool(settings.peer.urls),
            )
        elif tier in lookup:
            found[tier] = SharedTier(
                tier, store, catalog, busy, time.monotonic, lambda: memory.chunk_bytes, lookup[tier]
            )
        else:
            found[tier] = OwnTier(
                tier,
                store,
                settings.disk.size,
                catalog,
                busy,
                time.monotonic,
                DeletionLog(settings.arena),
            )
    return found


def _too_large(layout: Layout, lower: Mapping[Tier, LowerTier]) -> str:
    size = layout.ranks * layout.layers * layout.layer_bytes
    for tier, found in lower.items():
        if found.largest is not None and size > found.largest:
            return (
                f"a chunk of this model has {size} bytes, and the {tier.label} tier takes at most "
                f"{found.largest} in one object: use fewer chunk tokens, or leave out that tier"
            )
    return ""


def _index_and_feed(
    settings: AgentSettings, core: Core, lower: dict[Tier, LowerTier]
) -> tuple[GpuIndex, Feed]:
    gpu = GpuIndex(
        lambda key, added: feed.change(Tier.GPU, key, added), lambda known: feed.state(known, core.draining)
    )
    view = View(
        opening=lambda: _opening(settings.replica, core, gpu),
        tiers=lambda: (Tier.GPU, Tier.MEMORY, *(tier for tier in lower if tier != Tier.PEER)),
        keys=lambda tier: gpu.keys() if tier == Tier.GPU else core.catalog.keys(tier),
        speeds=lambda: _speeds(lower),
        chunk_bytes=lambda: core.memory.chunk_bytes,
        connected=lambda: bool(core.schedulers),
    )
    feed = Feed(view)
    return gpu, feed


def _told(feed: Feed) -> Callable[[Tier, bytes, bool], None]:
    """What other agents have in memory their own feeds say, and better."""

    def changed(tier: Tier, key: bytes, added: bool) -> None:
        if tier != Tier.PEER:
            feed.change(tier, key, added)

    return changed


def _hooks(
    core: Core,
    lower: dict[Tier, LowerTier],
    writebehind: WriteBehind,
    gpu: GpuIndex,
    events: GpuEvents | None,
    feed: Feed,
    totals: Totals,
    drain: Drain,
    pins: Pins,
    connections_changed: Callable[[], None],
) -> Hooks:
    def layout_changed(layout: Layout) -> None:
        core.authority.revision = layout.description.get("revision", "")
        gpu.serve(layout)
        for tier in lower.values():
            tier.describe(layout.values)
            tier.serve(layout.fingerprint)
        feed.renew()

    def engine_arrived(engine: str) -> None:
        if events is not None:
            events.engine_arrived(engine)

    def forgotten() -> None:
        for tier in lower.values():
            tier.drop_all()

    def recorded(record: RequestRecord) -> None:
        totals.add(record)
        feed.record(record)

    def connections() -> None:
        feed.connection_changed()
        drain.notice()
        connections_changed()

    def loaded(load: EngineLoad) -> None:
        feed.load(load)
        drain.notice()

    def gone(keys: list[bytes]) -> None:
        # What a hung disk has comes back with it.
        pins.unpin([key for key in keys if not any(tier.hides(key) for tier in lower.values())])

    return Hooks(
        committed=writebehind.add,
        record=recorded,
        load=loaded,
        engine=engine_arrived,
        layout=layout_changed,
        forgotten=forgotten,
        connections=connections,
        gone=gone,
    )


def _weigher(core: Core, lower: dict[Tier, LowerTier]) -> Callable[[Chunk, Tier], float]:
    """Seconds that a hit saves: recompute, less the reload where a lower tier has the chunk too."""

    def weigh(chunk: Chunk, tier: Tier) -> float:
        layout = core.memory.layout
        tokens = layout.chunk_tokens if layout is not None else 1
        prefill = core.prefill or _PREFILL_PRIOR
        recompute = prefill.seconds(chunk.index * tokens, (chunk.index + 1) * tokens)
        # A peer evicts when it likes: that it has the chunk is no reason to let it go here.
        kept = chunk.below - {Tier.PEER}
        if tier == Tier.MEMORY and kept:
            reload = lower[preferred(kept)[0]].speed.price.seconds(core.memory.chunk_bytes)
            return min(recompute, max(reload, _LEAST_SHARE * recompute))
        return recompute

    return weigh


def _opening(replica: str, core: Core, gpu: GpuIndex) -> Opening:
    layout = core.memory.layout
    return Opening(
        version=FEED_VERSION,
        epoch=core.epoch,
        replica=replica,
        fingerprint=layout.fingerprint if layout is not None else b"",
        group=layout.group if layout is not None else 0,
        model=layout.model if layout is not None else "",
        chunk_tokens=layout.chunk_tokens if layout is not None else 0,
        block_tokens=layout.block_tokens if layout is not None else 0,
        gpu_known=gpu.known,
        draining=core.draining,
    )


def _speeds(lower: dict[Tier, LowerTier]) -> tuple[TierSpeed, ...]:
    return tuple(
        TierSpeed(
            tier=int(tier),
            latency_seconds=found.speed.price.latency,
            bytes_per_second=0.0 if found.problem or found.closed else found.speed.price.bandwidth,
        )
        for tier, found in lower.items()
    )
