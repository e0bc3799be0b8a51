"""kopf's watches: every event of a CacheCluster or one of its children only enqueues the cluster.

kopf runs on a thread and loop of its own: when it ends it cancels every task that was started after it, and
its event handling never delays a reconciliation. It only reads: no peering, no finalizers, no annotations, no
events. Children are filtered by label at the API server. Used by app.py.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import kopf

from kvist_operator.control.api import Api, Key
from kvist_operator.control.errors import Forbidden, NotFound
from kvist_operator.control.resources import (
    CLUSTERS,
    MANAGED_SELECTOR,
    OPTIONAL_GROUP,
    OPTIONAL_KINDS,
    PODS,
    Resource,
    managed,
)
from kvist_operator.render.kube.meta import LABEL_INSTANCE, MANAGER

STOP_SECONDS = 10.0
# A change rarely comes alone: one reconciliation is for all that follow so soon.
BURST_SECONDS = 0.3
AGAIN_SECONDS = 60.0
_log = logging.getLogger(__name__)


class Watches:
    """`add` gets a key and a delay, on the loop that `run` was called on. `namespaces` empty: all.

    Namespaces that may not be listed are left out.
    """

    def __init__(
        self,
        api: Api,
        login: Callable[[], kopf.ConnectionInfo],
        add: Callable[[Key, float], object],
        namespaces: Iterable[str],
    ) -> None:
        self._api = api
        self._login = login
        self._add = add
        self._namespaces = tuple(namespaces)
        self._left_out: frozenset[str] = frozenset()
        self._children: tuple[Resource, ...] = ()

    async def run(self) -> None:
        """Until cancelled; raises RuntimeError when kopf ends, ApiError when nothing can be watched.

        It also ends, to be started again, when a namespace that was left out can be watched.
        """
        if CLUSTERS.kind not in await self._api.kinds(CLUSTERS):
            raise NotFound(f"the API server has no {CLUSTERS.plural}.{CLUSTERS.group}: install the CRD")
        optional = await self._api.kinds(OPTIONAL_GROUP) & OPTIONAL_KINDS
        self._children = (*managed(optional), PODS)
        watched = await self._allowed()
        loop, stop = asyncio.get_running_loop(), threading.Event()
        over: asyncio.Future[None] = loop.create_future()
        executor = ThreadPoolExecutor(1, thread_name_prefix="watches")
        ended = loop.run_in_executor(executor, self._watch, loop, stop, over, watched)
        try:
            by_itself = await self._until_over(over, watched)
        finally:
            stop.set()
            await asyncio.wait({ended}, timeout=STOP_SECONDS)
            executor.shutdown(wait=False)
        if by_itself:
            if ended.done():
                ended.result()
            raise RuntimeError("the watches ended")

    async def _until_over(self, over: asyncio.Future[None], watched: tuple[str, ...]) -> bool:
        """True: kopf ended; False: there is more, or less, to watch."""
        while len(watched) < len(self._namespaces):
            await asyncio.wait({over}, timeout=AGAIN_SECONDS)
            if not over.done() and await self._allowed() != watched:
                return False
            if over.done():
                return True
        await asyncio.shield(over)
        return True

    async def _allowed(self) -> tuple[str, ...]:
        """Namespaces that may be listed. kopf gives all up for one that may not."""
        allowed: list[str] = []
        refused: Forbidden | NotFound | None = None
        for namespace in self._namespaces:
            try:
                await self._api.list(CLUSTERS, namespace)
                allowed.append(namespace)
            except (Forbidden, NotFound) as error:
                refused = error
                if namespace not in self._left_out:
                    _log.warning("namespace %s is not watched: %s", namespace, error)
        self._left_out = frozenset(self._namespaces).difference(allowed)
        if refused is not None and not allowed:
            raise refused
        return tuple(allowed)

    def _watch(
        self,
        loop: asyncio.AbstractEventLoop,
        stop: threading.Event,
        over: asyncio.Future[None],
        namespaces: tuple[str, ...],
    ) -> None:
        def told() -> None:
            if not over.done():
                over.set_result(None)

        async def watching() -> None:
            try:
                await kopf.operator(
                    registry=self._registry(loop),
                    settings=self._settings(),
                    standalone=True,
                    # Unused without peering. kopf would take the user's name, and a pod's UID has none.
                    identity=MANAGER,
                    clusterwide=not namespaces,
                    namespaces=namespaces,
                    stop_flag=stop,
                )
            finally:
                # kopf waits for the flag on a thread of this loop, which the loop's end would wait for.
                stop.set()
                if not loop.is_closed():
                    loop.call_soon_threadsafe(told)

        asyncio.run(watching())

    def _registry(self, loop: asyncio.AbstractEventLoop) -> kopf.OperatorRegistry:
        registry = kopf.OperatorRegistry()

        def enqueue(namespace: str | None, name: str | None) -> None:
            if namespace and name and not loop.is_closed():
                loop.call_soon_threadsafe(self._add, Key(namespace, name), BURST_SECONDS)

        async def on_cluster(namespace: str | None, name: str | None, **_: Any) -> None:
            enqueue(namespace, name)

        async def on_child(namespace: str | None, labels: Any, **_: Any) -> None:
            enqueue(namespace, labels.get(LABEL_INSTANCE))

        async def on_login(**_: Any) -> kopf.ConnectionInfo:
            return self._login()

        kopf.on.login(registry=registry)(on_login)
        kopf.on.event(*_selector(CLUSTERS), registry=registry)(on_cluster)
        for resource in self._children:
            kopf.on.event(*_selector(resource), registry=registry)(on_child)
        return registry

    def _settings(self) -> kopf.OperatorSettings:
        settings = kopf.OperatorSettings()
        settings.posting.enabled = False
        settings.scanning.disabled = True
        selector = ",".join(f"{name}={value}" for name, value in MANAGED_SELECTOR.items())
        for resource in self._children:
            settings.watching.label_selectors[resource.group, resource.plural] = selector
        return settings


def _selector(resource: Resource) -> tuple[str, str, str]:
    return resource.group, resource.version, resource.plural
