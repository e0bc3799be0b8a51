"""Reasons of conditions and events, each documented once; docs/operations.md has the same table.

A reason is a constant that programs may compare; the message beside it says what to do: `told` puts the
remedy of its reason behind what is the matter. Each reason with a remedy has a section in docs/runbooks.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

# Everything is well.
ALL_READY: Final = "AllReady"
MIRRORING: Final = "Mirroring"
NOT_CONFIGURED: Final = "NotConfigured"
REACHABLE: Final = "Reachable"
NOT_ASKED: Final = "NotAsked"
SERVING: Final = "Serving"
AS_EXPECTED: Final = "AsExpected"
SETTLED: Final = "Settled"
CACHE_DISABLED: Final = "CacheDisabled"
# On the way.
STARTING: Final = "Starting"
SCALING: Final = "Scaling"
DRAINING: Final = "Draining"
ROLLING: Final = "Rolling"
# Something is missing.
SOME_NOT_READY: Final = "SomeNotReady"
NONE_READY: Final = "NoneReady"
SCALED_TO_ZERO: Final = "ScaledToZero"
OLD_REVISION: Final = "OldRevision"
ROUTER_NOT_READY: Final = "RouterNotReady"
ROUTER_SILENT: Final = "RouterSilent"
NOT_MIRRORED: Final = "NotMirrored"
TOKENS_DIFFER: Final = "TokensDiffer"
VIEW_DOUBTED: Final = "ViewDoubted"
NO_ROUTE: Final = "NoRoute"
BACKEND_LOST: Final = "BackendLost"
# Somebody has to do something.
INVALID_SPEC: Final = "InvalidSpec"
REFUSED: Final = "Refused"
FORBIDDEN: Final = "Forbidden"
NAME_TAKEN: Final = "NameTaken"
SECRET_MISSING: Final = "SecretMissing"
ENGINE_BROKEN: Final = "EngineBroken"
ROUTER_BROKEN: Final = "RouterBroken"
REDIS_BROKEN: Final = "RedisBroken"
PODS_REFUSED: Final = "PodsRefused"
STALLED: Final = "Stalled"
AUTOSCALER_FAILING: Final = "AutoscalerFailing"
INTERNAL: Final = "InternalError"
# Of events only.
SCALED: Final = "Scaled"
DRAIN_STARTED: Final = "DrainStarted"
DRAIN_UNDONE: Final = "DrainUndone"
EVICTED: Final = "Evicted"
EVICTION_REFUSED: Final = "EvictionRefused"
PRUNED: Final = "Pruned"
REPAIRED: Final = "Repaired"
CLEARED: Final = "Cleared"
CHUNKS_STAY: Final = "ChunksStay"

MEANING: Final[Mapping[str, str]] = {
    ALL_READY: "All wanted pods are ready and of the current revision.",
    MIRRORING: "Every router mirrors what every ready engine holds, and renders the engine's exact tokens.",
    NOT_CONFIGURED: "The spec names no shared tier.",
    REACHABLE: "The shared tier answers.",
    NOT_ASKED: "No agent could be asked about the shared tier: no engine serves yet, or none answers.",
    SERVING: "A request through the router is answered by the current generation.",
    AS_EXPECTED: "Nothing needs attention.",
    SETTLED: "Nothing is being changed.",
    CACHE_DISABLED: "`cache.enabled` is false: plain engines behind a router.",
    STARTING: "Pods are being created or load their model.",
    SCALING: "The number of engines is changing.",
    DRAINING: "An engine hands its work and its chunks over before it goes.",
    ROLLING: "Engines are replaced one at a time by a new revision.",
    SOME_NOT_READY: "Some, not all, wanted engines are ready. `kubectl describe pod` of the named one.",
    NONE_READY: "No engine is ready.",
    SCALED_TO_ZERO: "`engine.replicas` is 0: requests are refused until it is raised.",
    OLD_REVISION: "Pods of an older revision still serve; the rollout goes on.",
    ROUTER_NOT_READY: "No router pod of the current revision is ready.",
    ROUTER_SILENT: "A router's admin port does not answer the operator. Check NetworkPolicies.",
    NOT_MIRRORED: "A router does not know yet what an engine holds; requests are routed, reuse is by chance.",
    TOKENS_DIFFER: "A router asks engines for tokens: its own are not proven equal. Slower, right.",
    VIEW_DOUBTED: "Engines reuse less than routers are told is there. Routed on, by less of it.",
    NO_ROUTE: "No router knows a healthy engine that serves this model.",
    BACKEND_LOST: "The shared tier does not answer. Engines use local ones; it is taken up again by itself.",
    INVALID_SPEC: "The spec cannot be carried out; what runs is left alone. Correct the named field.",
    REFUSED: "The API server refuses an object, mostly for `podTemplate`. Correct what the message names.",
    FORBIDDEN: "The operator's role lacks a right. Upgrade the chart, or grant what the message names.",
    NAME_TAKEN: "An object of a wished name belongs to another. Rename the cluster or delete the object.",
    SECRET_MISSING: "A Secret or a key in it that the spec names is not there. Create it.",
    ENGINE_BROKEN: "An engine pod will not become ready by waiting. The message has the container's reason.",
    ROUTER_BROKEN: "A router pod will not become ready by waiting. The message has the container's reason.",
    REDIS_BROKEN: "A Redis pod will not become ready by waiting. The message has the container's reason.",
    PODS_REFUSED: "A program gets no pods: a quota, Pod Security, a missing account; the message says which.",
    STALLED: "Pods of the new revision are broken; old ones serve on. Correct or revert the spec.",
    AUTOSCALER_FAILING: "A HorizontalPodAutoscaler of the cluster says that it cannot scale.",
    INTERNAL: "The operator met a state it does not know. Its log has the trace; it tries again.",
    SCALED: "Event: the number of engines was changed.",
    DRAIN_STARTED: "Event: an engine began to drain before it is removed.",
    DRAIN_UNDONE: "Event: a draining engine is wanted again.",
    EVICTED: "Event: an engine pod was evicted, to be replaced by the current revision.",
    EVICTION_REFUSED: "Event: a disruption budget refuses the eviction; it is tried again.",
    PRUNED: "Event: an object that is no longer part of the cluster was deleted.",
    REPAIRED: "Event: an object that somebody else changed was set back.",
    CLEARED: "Event: the shared tiers were cleared before the cluster went.",
    CHUNKS_STAY: "Event: the cluster went and its chunks stay in the shared tiers; the message says why.",
}

REMEDY: Final[Mapping[str, str]] = {
    NOT_ASKED: "an engine has to be ready, and NetworkPolicies have to let the operator reach its agent",
    ROUTER_SILENT: "NetworkPolicies have to let the operator reach the router's admin port",
    NOT_MIRRORED: "requests are served, reuse is by chance; if this stays, read that pod's log of the agent",
    TOKENS_DIFFER: "answers are right, only slower; give routers and engines the same revision of the model",
    VIEW_DOUBTED: "answers are right; the logs of router and agent say what is claimed and not found",
    NO_ROUTE: "see what .status.engines says of each engine, then the router's log",
    BACKEND_LOST: "engines go on with local tiers; bring it back, it is used again by itself",
    INVALID_SPEC: "what runs is left alone until the field is corrected",
    REFUSED: "what runs is left alone; correct what is named, mostly in podTemplate",
    FORBIDDEN: "upgrade the chart, or grant the operator's role this right",
    NAME_TAKEN: "delete it, or rename the cluster",
    SECRET_MISSING: "create it, or let the operator read it; nothing else has to be done",
    ENGINE_BROKEN: "once the spec is corrected such pods are replaced first",
    ROUTER_BROKEN: "once the spec is corrected the Deployment replaces it",
    REDIS_BROKEN: "engines go on with local tiers; delete the pod once the cause is mended",
    PODS_REFUSED: "mend what is named, in the namespace or in podTemplate; it is tried again by itself",
    STALLED: "pods of the old revision serve on; correct or revert the spec",
    AUTOSCALER_FAILING: "see kubectl describe hpa; until then the number stays as it is",
    INTERNAL: "it is tried again; report it with the trace in the operator's log",
    EVICTION_REFUSED: "it is tried again; see kubectl get pdb",
    CHUNKS_STAY: "they age out by cache.ttl or the bucket's rules, or are removed there by hand",
}
_WHAT: Final = 700


def told(reason: str, what: str) -> str:
    """What is the matter, and what to do about it."""
    if reason not in REMEDY:
        return what
    return f"{what[:_WHAT]}; {REMEDY[reason]}"
