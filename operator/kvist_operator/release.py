"""`python -m kvist_operator release`: takes our finalizer off all CacheClusters, before the operator goes.

Run by the chart's pre-delete hook, or by hand. It takes the operators' Lease first: whoever holds that is the
only one that writes, so no operator sets the finalizer again. Called by app.py.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from kvist_connector.errors import ConfigError
from kvist_operator.control.api import Api
from kvist_operator.control.errors import Conflict, NotFound
from kvist_operator.control.farewell import mark_patch
from kvist_operator.control.lease import Elector
from kvist_operator.control.resources import CLUSTERS, DEPLOYMENTS, Object

_log = logging.getLogger(__name__)
# An operator that ends in order gives its Lease up at once, a killed one's runs out.
HANDOVER_SECONDS: Final = 45.0
RENEW_SECONDS: Final = 5.0
ATTEMPTS: Final = 5


async def release(
    api: Api,
    elector: Elector,
    namespaces: tuple[str | None, ...],
    deployment: tuple[str, str] | None,
    seconds: float,
) -> int:
    """How many clusters were freed. `deployment` (namespace, name) is the operator's, ended first. Raises
    ConfigError when an operator still acts after `seconds`, ApiError when the API server refuses."""
    if deployment is not None:
        await _end(api, *deployment)
    try:
        async with asyncio.timeout(seconds):
            await elector.alone()
    except TimeoutError as error:
        raise ConfigError(
            f"an operator still held its Lease after {seconds:g} s, and would set the finalizers again: "
            "scale its Deployment to 0, or name it with --deployment"
        ) from error
    try:
        return await _free_all(api, elector, namespaces)
    finally:
        await elector.release()


async def _free_all(api: Api, elector: Elector, namespaces: tuple[str | None, ...]) -> int:
    freed = 0
    for namespace in namespaces:
        for obj in await _list(api, namespace):
            if elector.remaining() < RENEW_SECONDS:
                await elector.turn()
            freed += await _free(api, obj)
    return freed


async def _end(api: Api, namespace: str, name: str) -> None:
    try:
        await api.patch(DEPLOYMENTS, namespace, name, {"spec": {"replicas": 0}}, subresource="scale")
    except NotFound:
        _log.info("there is no Deployment %s/%s", namespace, name)


async def _list(api: Api, namespace: str | None) -> list[Object]:
    try:
        return await api.list(CLUSTERS, namespace)
    except NotFound:
        return []  # the kind is not installed any more


async def _free(api: Api, obj: Object) -> bool:
    """Whether it had the finalizer. Others may write it meanwhile: their version is read and tried again."""
    meta, found = obj["metadata"], obj
    for _ in range(ATTEMPTS):
        patch = mark_patch(found, on=False)
        if patch is None:
            return False
        try:
            await api.patch(CLUSTERS, meta["namespace"], meta["name"], patch)
        except NotFound:
            return False
        except Conflict:
            again = await api.get(CLUSTERS, meta["namespace"], meta["name"])
            if again is None:
                return False
            found = again
        else:
            _log.info("%s/%s waits for no operator any more", meta["namespace"], meta["name"])
            return True
    raise Conflict(f"{meta['namespace']}/{meta['name']} changes all the time; try again", 409)
