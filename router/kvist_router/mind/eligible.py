"""Filters: which replicas may take a request at all, or the refusal that says why none.

Pure; called by mind.py. One that drains, or whose breaker is open, gets new requests only when there is
no other.
"""

from __future__ import annotations

from kvist_router.errors import Refused, Unavailable
from kvist_router.mind.interface import Refusal
from kvist_router.mind.models import ServedModel
from kvist_router.mind.replica import Replica

RETRY_AFTER_SECONDS = 2


def eligible(replicas: list[Replica], model: str | None, exclude: tuple[str, ...]) -> list[Replica]:
    """Replicas that can take a request for the model; raises Refused, Unavailable if waiting may help."""
    best = [
        replica
        for replica in replicas
        if replica.takes
        and replica.breaker.takes
        and replica.name not in exclude
        and (model in replica.models if model is not None else replica.models)
    ]
    return best or _second_best(replicas, model, exclude)


def _second_best(replicas: list[Replica], model: str | None, exclude: tuple[str, ...]) -> list[Replica]:
    serving = [
        replica for replica in replicas if replica.models and (model is None or model in replica.models)
    ]
    if not serving:
        known = sorted({name for replica in replicas for name in replica.models})
        if model is None or not known:
            raise Unavailable(nobody("no engine has answered yet"))
        raise Refused(unknown_model(model, known))
    up = [replica for replica in serving if replica.serves and replica.name not in exclude]
    if not up:
        raise Unavailable(nobody("no healthy replica serves this model"))
    staying = [replica for replica in up if not replica.draining] or up
    return [replica for replica in staying if replica.breaker.takes] or staying


def model_of(replica: Replica, model: str | None) -> ServedModel:
    """The model that a request without a name means: the first one."""
    return replica.models[model] if model is not None else next(iter(replica.models.values()))


def nobody(reason: str) -> Refusal:
    """Nothing can take the request now."""
    return Refusal(503, reason, "service_unavailable", code="no_replica", retry_after=RETRY_AFTER_SECONDS)


def unknown_model(model: str, known: list[str]) -> Refusal:
    """No replica serves it."""
    return Refusal(
        404,
        f"the model {model[:200]!r} does not exist; served here: {', '.join(known)}",
        param="model",
        code="model_not_found",
    )
