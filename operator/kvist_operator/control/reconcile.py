"""One reconciliation of one CacheCluster: read, decide, write. Called by workers.py.

    gather.py  snapshot of object, children, pods, routers' views      reads
    rollout.py what the engines need next                              pure
    render     the children as they shall be                           pure
    changes.py which of them to write                                  pure
    children.py, acts.py                                               write
    conditions.py, status.py                                           pure, then one write if it is worth it

Everything starts from what is there; nothing relies on what the last turn meant to do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

from kvist_connector.errors import ConfigError
from kvist_operator.control import reasons
from kvist_operator.control.acts import Acts, opened
from kvist_operator.control.api import Api, Key
from kvist_operator.control.changes import ChildKey, Left
from kvist_operator.control.children import Children, Written
from kvist_operator.control.conditions import Condition, Type, blocked, evaluate
from kvist_operator.control.errors import Forbidden, Invalid, NotFound, OperatorError
from kvist_operator.control.gather import Gatherer
from kvist_operator.control.journal import Journal
from kvist_operator.control.news import news
from kvist_operator.control.parting import Parting
from kvist_operator.control.problems import Problem
from kvist_operator.control.resources import CLUSTERS, Object
from kvist_operator.control.rollout import Action, Decision, decide
from kvist_operator.control.secret_values import mark_pods, references
from kvist_operator.control.snapshot import Snapshot, observed
from kvist_operator.control.status import blocked_status, status_of, status_patch, worth_writing
from kvist_operator.plan import kube_target, make_plan
from kvist_operator.render.kube import Context, control_token, endpoint, generated_secrets, own_token, render
from kvist_operator.spec import CacheCluster, parse
from kvist_operator.spec.checks import Facts, first_violation

# While something is under way it is looked at again this soon, and the longer nothing changes the later;
# its events mostly come sooner.
BUSY_SECONDS: Final = 3.0
BUSY_LIMIT: Final = 30.0
# Controllers see a new generation within moments; a status in between would only flicker.
UNSEEN_SECONDS: Final = 1.0
UNSEEN_TURNS: Final = 10
SECRETS_SECONDS: Final = 120.0
# What a person has to mend is looked at again without an event.
BLOCKED_SECONDS: Final = 60.0


@dataclass
class Memory:
    """Of one cluster: only what saves work. An operator that lost it does the same."""

    left: dict[ChildKey, Left] = field(default_factory=dict)
    written_at: float = float("-inf")
    unseen_turns: int = 0
    busy_turns: int = 0  # in a row, without a change of the status
    snapshot: Snapshot | None = None
    not_cleared: str = ""  # under deletion: why the shared tiers are not cleared yet


@dataclass(frozen=True)
class Outcome:
    """`again`: seconds until the next look, None: when something happens. `gone`: no such cluster."""

    again: float | None = None
    gone: bool = False


class Reconciler:
    """`context` holds what rendering needs and is the same for all clusters; the rest is filled in here."""

    def __init__(
        self,
        api: Api,
        gatherer: Gatherer,
        acts: Acts,
        parting: Parting,
        journal: Journal,
        context: Context,
        clock: Callable[[], float],
    ) -> None:
        self._api = api
        self._gatherer = gatherer
        self._children = Children(api)
        self._acts = acts
        self._parting = parting
        self._journal = journal
        self._context = context
        self._clock = clock
        self._memory: dict[Key, Memory] = {}

    @property
    def known(self) -> dict[Key, Memory]:
        """Clusters that exist, for the router poll."""
        return self._memory

    async def reconcile(self, key: Key) -> Outcome:
        """One turn; raises ApiError when it has to be tried again."""
        raw = await self._api.get(CLUSTERS, key.namespace, key.name)
        if raw is None:
            self._memory.pop(key, None)
            return Outcome(gone=True)
        if raw["metadata"].get("deletionTimestamp"):
            return await self._leaving(raw, self._memory.setdefault(key, Memory()))
        memory = self._memory.setdefault(key, Memory())
        try:
            raw = await self._parting.keep_mark(raw)
            cluster = typed(raw)
            if isinstance(cluster, Problem):
                return await self._blocked(raw, memory, cluster)
            return await self._turn(raw, cluster, memory)
        except (Invalid, Forbidden) as error:
            reason = reasons.FORBIDDEN if isinstance(error, Forbidden) else reasons.REFUSED
            return await self._blocked(raw, memory, Problem(reason, str(error)))

    async def _leaving(self, raw: Object, memory: Memory) -> Outcome:
        """Its children go with it by their owner reference, once nothing holds it any more."""
        cluster = typed(raw)
        reference = (
            own_token(raw["metadata"]["name"]) if isinstance(cluster, Problem) else control_token(cluster)
        )
        token = memory.snapshot.token if memory.snapshot is not None else ""
        waiting = await self._parting.end(raw, reference, token, memory.not_cleared)
        if waiting is None:
            return Outcome()
        memory.not_cleared = waiting.why
        return Outcome(again=waiting.again)

    async def _turn(self, raw: Object, cluster: CacheCluster, memory: Memory) -> Outcome:
        await self._children.ensure_secrets(raw, generated_secrets(cluster))
        snapshot = await self._gatherer.snapshot(raw, cluster)
        memory.snapshot = snapshot
        decision = decide(snapshot.engines)
        try:
            rendered = self._render(snapshot, decision)
        except ConfigError as error:
            return await self._blocked(raw, memory, Problem(reasons.INVALID_SPEC, str(error)))
        written = await self._children.write(snapshot, rendered, memory.left)
        if isinstance(written, Problem):
            return await self._blocked(raw, memory, written)
        await self._tell_written(raw, written)
        await self._act(snapshot, decision)
        after = replace(snapshot, children={**snapshot.children, **written.applied})
        return await self._report(after, decision, memory)

    async def tell_unknown(self, key: Key) -> None:
        """A turn ended in a way nobody thought of: say so in the status, if that works at all."""
        problem = Problem(reasons.INTERNAL, "the operator met a state that it does not know")
        try:
            raw = await self._api.get(CLUSTERS, key.namespace, key.name)
            if raw is not None:
                await self._blocked(raw, self._memory.setdefault(key, Memory()), problem)
        except OperatorError:
            return  # the next turn tries again

    def _render(self, snapshot: Snapshot, decision: Decision) -> tuple[Object, ...]:
        cluster = snapshot.cluster
        context = replace(
            self._context,
            namespace=snapshot.namespace,
            uid=snapshot.raw["metadata"]["uid"],
            kinds=snapshot.kinds,
            router_replicas_owned_by_hpa=replicas_co_owned(snapshot.deployment),
            engine_replicas=decision.replicas,
        )
        rendered = render(cluster, make_plan(cluster, kube_target(cluster)), context)
        return mark_pods(rendered, snapshot.env_secrets)

    async def _act(self, snapshot: Snapshot, decision: Decision) -> None:
        shut = opened(snapshot.pods, snapshot.views)
        await self._acts.open_gates(snapshot.namespace, shut, snapshot.now)
        token = ""
        if decision.action in (Action.DRAIN, Action.UNDRAIN):
            token = snapshot.token or await self._gatherer.token(
                snapshot.namespace, control_token(snapshot.cluster)
            )
        await self._acts.carry_out(snapshot, decision, token)

    async def _report(self, snapshot: Snapshot, decision: Decision, memory: Memory) -> Outcome:
        programs = [found for found in (snapshot.stateful_set, snapshot.deployment) if found is not None]
        unseen = not all(observed(obj) for obj in programs)
        memory.unseen_turns = memory.unseen_turns + 1 if unseen else 0
        if unseen and snapshot.raw.get("status") and memory.unseen_turns < UNSEEN_TURNS:
            return Outcome(again=UNSEEN_SECONDS)
        conditions = evaluate(snapshot, decision)
        tls = snapshot.cluster.spec.router.tls is not None
        url = endpoint(snapshot.name, snapshot.namespace, tls=tls)
        status = status_of(snapshot, conditions, url)
        later = await self._write_status(snapshot.raw, status, conditions, memory)
        busy = decision.action is not Action.NONE or unseen or not _settled(conditions)
        memory.busy_turns = memory.busy_turns + 1 if busy and status == snapshot.raw.get("status") else 0
        pause = min(BUSY_LIMIT, BUSY_SECONDS * (1 + memory.busy_turns / 10))
        if busy:
            return Outcome(again=pause)
        # The API server tells nobody that a Secret changed, came or went which may only be read by name.
        waits = [later] if later is not None else []
        names_secrets = any(True for _ in references(snapshot.cluster))
        return Outcome(again=min([*waits, SECRETS_SECONDS]) if names_secrets else later)

    async def _blocked(self, raw: Object, memory: Memory, problem: Problem) -> Outcome:
        conditions = blocked(problem)
        status = blocked_status(raw, conditions, self._gatherer.now())
        await self._write_status(raw, status, conditions, memory)
        # What runs is left alone, but must be able to come back: a pod of it may have been made anew.
        namespace = raw["metadata"]["namespace"]
        pods = await self._gatherer.pods(namespace, raw["metadata"]["name"])
        shut = opened(pods, await self._gatherer.views(pods))
        await self._acts.open_gates(namespace, shut, self._gatherer.now())
        return Outcome(again=BLOCKED_SECONDS)

    async def _write_status(
        self, raw: Object, status: Object, conditions: list[Condition], memory: Memory
    ) -> float | None:
        """Write now, or return in how many seconds it is worth it; None: not at all."""
        old = raw.get("status") or {}
        pause = worth_writing(old, status, self._clock() - memory.written_at)
        if pause is None or pause > 0:
            return pause
        try:
            await self._api.apply(CLUSTERS, status_patch(raw, status), subresource="status")
        except NotFound:
            return None  # deleted meanwhile
        memory.written_at = self._clock()
        for item in news(raw, conditions):
            await self._journal.tell(raw, item.reason, item.message, warning=item.warning)
        return None

    async def _tell_written(self, raw: Object, written: Written) -> None:
        for resource, name in written.repaired:
            await self._journal.tell(
                raw,
                reasons.REPAIRED,
                f"{resource.kind} {name} was changed and set back; change the CacheCluster instead",
            )
        for resource, name in written.pruned:
            await self._journal.tell(raw, reasons.PRUNED, f"{resource.kind} {name} was deleted")


def typed(raw: Object) -> CacheCluster | Problem:
    """The object in its typed form, or what is wrong with it. Pure."""
    kept = ("name", "namespace", "labels", "annotations")
    metadata = {name: value for name, value in raw["metadata"].items() if name in kept}
    body = {
        "apiVersion": raw["apiVersion"],
        "kind": raw["kind"],
        "metadata": metadata,
        "spec": raw.get("spec"),
    }
    try:
        cluster = parse(body)
    except ConfigError as error:
        return Problem(reasons.INVALID_SPEC, str(error))
    violation = first_violation(cluster, Facts())
    return cluster if violation is None else Problem(reasons.INVALID_SPEC, str(violation))


def replicas_co_owned(deployment: Object | None) -> bool:
    """Whether somebody else set spec.replicas too: only then may the operator leave the field out."""
    if deployment is None:
        return False
    entries = deployment["metadata"].get("managedFields") or ()
    return any(
        "f:replicas" in entry.get("fieldsV1", {}).get("f:spec", {})
        for entry in entries
        if entry.get("subresource") == "scale"
    )


def _settled(conditions: list[Condition]) -> bool:
    """Everything that is waited for has come; what is wrong for good is looked at by the router poll."""
    expected = (Type.READY, Type.ENGINES, Type.ROUTER)
    return all(item.status for item in conditions if item.type in expected)
