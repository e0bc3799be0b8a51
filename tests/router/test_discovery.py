"""Every source of replicas keeps one contract; that of Kubernetes also on a real API server (KUBECONFIG)."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random
from typing import Any
from uuid import uuid4

import aiohttp
import pytest
import yaml
from aiohttp import web

from kvist_connector.settings import validate
from kvist_router.discovery.file import FileSource
from kvist_router.discovery.kubernetes import KubernetesSource, Pace
from kvist_router.discovery.kubernetes_api import Access, KubernetesApi
from kvist_router.discovery.source import Listed, Source
from kvist_router.discovery.static import StaticSource
from kvist_router.settings import ReplicaSettings
from kvist_router.testing.kubernetes import FakeKubernetes
from kvist_router.testing.server import LocalServer

SECONDS = 60
SERVICE = "pool"
QUICK = Pace(first_pause=0.01, longest_pause=0.05)
SLICES = "/apis/discovery.k8s.io/v1/namespaces/{}/endpointslices"


def url(number: int, port: int = 8100) -> str:
    return f"http://10.0.0.{number}:{port}"


def replica(number: int, address: int | None = None) -> ReplicaSettings:
    where = number if address is None else address
    return validate(ReplicaSettings, {"name": f"r-{number}", "url": url(where), "agent": url(where, 8200)})


def endpoint(item: ReplicaSettings, **conditions: bool) -> dict[str, Any]:
    return {
        "addresses": [item.url.split("//")[1].split(":")[0]],
        "conditions": {"ready": True, "serving": True, "terminating": False, **conditions},
        "targetRef": {"kind": "Pod", "name": item.name},
    }


def endpoint_slice(name: str, endpoints: list[dict[str, Any]], service: str = SERVICE) -> dict[str, Any]:
    ports = [{"name": "engine", "port": 8100}, {"name": "agent", "port": 8200}, {"name": "x", "port": 1}]
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": name, "labels": {"kubernetes.io/service-name": service}},
        "addressType": "IPv4",
        "endpoints": endpoints,
        "ports": ports,
    }


class Follower:
    """Reads a source; `list` is the last one."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.list: tuple[Listed, ...] | None = None
        self._news = asyncio.Condition()
        self._task = asyncio.create_task(self._run())

    async def until(self, *wanted: Listed) -> None:
        async with asyncio.timeout(SECONDS), self._news:
            await self._news.wait_for(lambda: self.list == wanted or self._task.done())
        assert self.list == wanted

    async def problem(self, words: str) -> None:
        async with asyncio.timeout(SECONDS):
            while words not in self.source.problem or (not words and self.source.problem):  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        async for found in self.source.watch():
            async with self._news:
                self.list = found
                self._news.notify_all()


class Static:
    """Replicas of the settings."""

    changes = False

    async def set(self, *items: ReplicaSettings) -> None:
        self.source = StaticSource(items)


class File:
    """A file that is replaced."""

    changes = True
    broken_words = "does not exist"

    def __init__(self, folder: Path) -> None:
        self._file = folder / "replicas.yaml"
        self.source = FileSource(self._file, poll_seconds=0.01)

    async def set(self, *items: ReplicaSettings) -> None:
        new = self._file.with_suffix(".new")
        new.write_text(json.dumps([item.model_dump() for item in items]))
        new.rename(self._file)

    async def broken(self) -> None:
        self._file.unlink(missing_ok=True)

    async def mended(self, *items: ReplicaSettings) -> None:
        await self.set(*items)


class Fake:
    """The stand-in of an API server."""

    changes = True
    broken_words = "403"

    def __init__(self, server: FakeKubernetes, source: KubernetesSource, namespace: str) -> None:
        self.server, self.source, self.namespace = server, source, namespace

    async def set(self, *items: ReplicaSettings) -> None:
        await self.put(endpoint_slice("pool-a", [endpoint(item) for item in items]))

    async def put(self, item: dict[str, Any]) -> None:
        await self.server.put(self.namespace, item)

    async def drop(self, name: str) -> None:
        await self.server.drop(self.namespace, name)

    async def broken(self) -> None:
        self.server.refuse = 403
        await self.server.end_watches()

    async def mended(self, *items: ReplicaSettings) -> None:
        self.server.refuse = 0
        await self.set(*items)


class Real:
    """A real API server; the source has a service account with the rights that the operator renders."""

    changes = True
    broken_words = "401"

    def __init__(
        self, session: aiohttp.ClientSession, base: str, tls: ssl.SSLContext, token_file: Path, ca_file: Path
    ) -> None:
        self._session, self._base, self._tls = session, base, tls
        self._token_file, self._ca_file = token_file, ca_file
        self.namespace = f"kvist-{uuid4().hex[:8]}"
        self._role = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{self.namespace}"

    async def start(self) -> None:
        core = f"/api/v1/namespaces/{self.namespace}"
        await self.ask("POST", "/api/v1/namespaces", {"metadata": {"name": self.namespace}})
        await self.ask("POST", f"{core}/serviceaccounts", {"metadata": {"name": "router"}})
        rule = {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"]}
        verbs = {"verbs": ["get", "list", "watch"]}
        role = {"metadata": {"name": "router"}, "rules": [rule | verbs]}
        await self.ask("POST", f"{self._role}/roles", role)
        await self.ask("POST", f"{self._role}/rolebindings", {
            "metadata": {"name": "router"},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "router"},
            "subjects": [{"kind": "ServiceAccount", "name": "router", "namespace": self.namespace}],
        })  # fmt: skip
        await self._give_token()
        access = Access(self._base, self._token_file, self._ca_file)
        # Watches are short, so that a token that became wrong shows soon.
        pace = Pace(watch=1.0, relist=5.0, first_pause=0.01, longest_pause=0.05)
        self.source = KubernetesSource(
            KubernetesApi(self._session, access), self.namespace, SERVICE, Random(1), pace
        )

    async def _give_token(self) -> None:
        path = f"/api/v1/namespaces/{self.namespace}/serviceaccounts/router/token"
        found = await self.ask("POST", path, {"spec": {"expirationSeconds": 600}})
        self._token_file.write_text(found["status"]["token"])

    async def set(self, *items: ReplicaSettings) -> None:
        await self.put(endpoint_slice("pool-a", [endpoint(item) for item in items]))

    async def put(self, item: dict[str, Any]) -> None:
        path = f"{SLICES.format(self.namespace)}/{item['metadata']['name']}?fieldManager=test&force=true"
        await self.ask("PATCH", path, item, "application/apply-patch+yaml")

    async def drop(self, name: str) -> None:
        await self.ask("DELETE", f"{SLICES.format(self.namespace)}/{name}", None)

    async def broken(self) -> None:
        self._token_file.write_text("not a token")

    async def mended(self, *items: ReplicaSettings) -> None:
        await self._give_token()
        await self.set(*items)

    async def stop(self) -> None:
        await self.ask("DELETE", f"/api/v1/namespaces/{self.namespace}", None)

    async def ask(self, method: str, path: str, body: Any, kind: str = "application/json") -> dict[str, Any]:
        data = None if body is None else json.dumps(body)
        async with self._session.request(
            method, self._base + path, data=data, headers={"content-type": kind}, ssl=self._tls
        ) as answer:
            text = await answer.text()
            assert answer.status < 300, text
            found: dict[str, Any] = json.loads(text)
            return found


def credentials(folder: Path) -> tuple[str, ssl.SSLContext, Path]:
    """API server, the administrator's TLS and the CA file of KUBECONFIG; skips where there is none."""
    given = os.environ.get("KUBECONFIG", "")
    if not given or not Path(given).exists():
        pytest.skip(
            "KUBECONFIG names no file: `e2e/cluster api-only` starts a real API server and says which"
        )
    found = yaml.safe_load(Path(given).read_text())
    cluster, user = found["clusters"][0]["cluster"], found["users"][0]["user"]

    def file(part: dict[str, str], name: str) -> Path:
        if name in part:
            return Path(given).parent / part[name]
        path = folder / name
        path.write_bytes(base64.b64decode(part[name + "-data"]))
        return path

    ca = file(cluster, "certificate-authority")
    tls = ssl.create_default_context(cafile=str(ca))
    tls.load_cert_chain(file(user, "client-certificate"), file(user, "client-key"))
    return cluster["server"], tls, ca


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as found:
        yield found


async def fake(stack: AsyncExitStack, folder: Path) -> Fake:
    server = await stack.enter_async_context(FakeKubernetes(token="secret"))
    session = await stack.enter_async_context(aiohttp.ClientSession())
    token = folder / "token"
    token.write_text("secret\n")
    api = KubernetesApi(session, Access(server.url, token, None))
    return Fake(server, KubernetesSource(api, "here", SERVICE, Random(1), QUICK), "here")


async def real(stack: AsyncExitStack, folder: Path) -> Real:
    base, tls, ca = credentials(folder)
    session = await stack.enter_async_context(aiohttp.ClientSession())
    found = Real(session, base, tls, folder / "token", ca)
    await found.start()
    stack.push_async_callback(found.stop)
    return found


KINDS = ["static", "file", "kubernetes", "real-kubernetes"]


@pytest.fixture(params=KINDS)
async def place(request, stack, tmp_path) -> Any:
    """Where replicas come from."""
    match request.param:
        case "static":
            return Static()
        case "file":
            return File(tmp_path)
        case "kubernetes":
            return await fake(stack, tmp_path)
    return await real(stack, tmp_path)


@pytest.fixture(params=["kubernetes", "real-kubernetes"])
async def api(request, stack, tmp_path) -> Any:
    """An API server."""
    return await (fake if request.param == "kubernetes" else real)(stack, tmp_path)


@pytest.fixture
async def follow(stack):
    """Follow a source until the end of the test."""

    def begin(source: Source) -> Follower:
        follower = Follower(source)
        stack.push_async_callback(follower.close)
        return follower

    return begin


# ---- the contract


async def test_the_first_list_is_whole(place, follow) -> None:
    await place.set(replica(1), replica(2))
    follower = follow(place.source)
    await follower.until(Listed(replica(1)), Listed(replica(2)))
    await follower.problem("")


async def test_replicas_come_move_and_go(place, follow) -> None:
    await place.set(replica(1))
    follower = follow(place.source)
    await follower.until(Listed(replica(1)))
    if place.changes:
        await place.set(replica(1), replica(2))
        await follower.until(Listed(replica(1)), Listed(replica(2)))
        await place.set(replica(1), replica(2, address=9))
        await follower.until(Listed(replica(1)), Listed(replica(2, address=9)))
        await place.set(replica(2, address=9))
        await follower.until(Listed(replica(2, address=9)))


async def test_a_source_that_fails_says_so_and_the_last_list_stays(place, follow) -> None:
    if not place.changes:
        return
    await place.set(replica(1))
    follower = follow(place.source)
    await follower.until(Listed(replica(1)))
    await place.broken()
    await follower.problem(place.broken_words)
    assert follower.list == (Listed(replica(1)),)
    await place.mended(replica(1), replica(2))
    await follower.until(Listed(replica(1)), Listed(replica(2)))
    await follower.problem("")


async def test_a_source_that_fails_from_the_start_is_waited_for(place, follow) -> None:
    if not place.changes:
        return
    await place.broken()
    follower = follow(place.source)
    await follower.problem(place.broken_words)
    assert follower.list is None
    await place.mended(replica(1))
    await follower.until(Listed(replica(1)))


# ---- Kubernetes


async def test_conditions_of_endpoints(api, follow) -> None:
    await api.put(
        endpoint_slice(
            "pool-a",
            [
                endpoint(replica(1)),
                # A Service that publishes not-ready addresses calls every endpoint ready.
                endpoint(replica(2), ready=True, serving=False),
                endpoint(replica(3), ready=False, serving=True, terminating=True),
            ],
        )
    )
    follower = follow(api.source)
    await follower.until(
        Listed(replica(1)), Listed(replica(2), ready=False), Listed(replica(3), draining=True)
    )


async def test_slices_of_one_service_are_one_list_and_others_are_none_of_it(api, follow) -> None:
    await api.put(endpoint_slice("pool-a", [endpoint(replica(1))]))
    await api.put(endpoint_slice("other", [endpoint(replica(7))], service="other"))
    follower = follow(api.source)
    await follower.until(Listed(replica(1)))
    await api.put(endpoint_slice("pool-b", [endpoint(replica(2))]))
    await follower.until(Listed(replica(1)), Listed(replica(2)))
    await api.drop("pool-a")
    await follower.until(Listed(replica(2)))
    await api.drop("pool-b")
    await follower.until()
    await follower.problem("no endpoint")


async def test_a_pod_in_two_slices_is_one_replica(api, follow) -> None:
    leaving = endpoint(replica(1), terminating=True)
    await api.put(endpoint_slice("pool-a", [leaving]))
    await api.put(endpoint_slice("pool-b", [endpoint(replica(1, address=2))]))
    await follow(api.source).until(Listed(replica(1, address=2)))


async def test_a_service_without_the_engines_port_is_said(api, follow) -> None:
    wrong = endpoint_slice("pool-a", [endpoint(replica(1))])
    wrong["ports"] = [{"name": "http", "port": 8100}]
    await api.put(wrong)
    follower = follow(api.source)
    await follower.problem("no port named 'engine'")


async def test_a_version_that_is_gone_brings_a_new_list(stack, tmp_path, follow) -> None:
    api = await fake(stack, tmp_path)
    await api.set(replica(1))
    follower = follow(api.source)
    await follower.until(Listed(replica(1)))
    await api.server.forget()
    await api.set(replica(2))
    await follower.until(Listed(replica(2)))
    assert api.server.lists == 2


async def test_a_bookmark_moves_the_version_on(stack, tmp_path, follow, until) -> None:
    api = await fake(stack, tmp_path)
    await api.set(replica(1))
    follower = follow(api.source)
    await follower.until(Listed(replica(1)))
    await until(lambda: api.server.watches == 1)
    await api.server.bookmark()
    await api.set(replica(1), replica(2))
    await follower.until(Listed(replica(1)), Listed(replica(2)))
    assert (api.server.lists, api.server.watches) == (1, 1)


async def test_a_broken_watch_is_taken_up_again(stack, tmp_path, follow) -> None:
    api = await fake(stack, tmp_path)
    await api.set(replica(1))
    follower = follow(api.source)
    await follower.until(Listed(replica(1)))
    await api.server.end_watches()
    await api.set(replica(2))
    await follower.until(Listed(replica(2)))


async def test_what_is_no_answer_of_an_api_server_is_said(stack, follow) -> None:
    class Page(LocalServer):
        def application(self) -> web.Application:
            app = web.Application()

            async def answer(_: web.Request) -> web.Response:
                return web.Response(text="<html>")

            app.router.add_get("/{path:.*}", answer)
            return app

    server = await stack.enter_async_context(Page())
    session = await stack.enter_async_context(aiohttp.ClientSession())
    api = KubernetesApi(session, Access(server.url, None, None))
    follower = follow(KubernetesSource(api, "here", SERVICE, Random(1), QUICK))
    await follower.problem("is not understood")


async def test_a_missing_token_file_is_said_with_its_setting(stack, tmp_path, follow) -> None:
    session = await stack.enter_async_context(aiohttp.ClientSession())
    api = KubernetesApi(session, Access("http://127.0.0.1:1", tmp_path / "none", None))
    await follow(KubernetesSource(api, "here", SERVICE, Random(1), QUICK)).problem("kubernetes.token_file")


async def test_a_token_that_is_no_file_is_not_waited_for(stack, tmp_path, follow) -> None:
    """A pipe has no end, and reading it would hold the thread."""
    os.mkfifo(tmp_path / "token")
    session = await stack.enter_async_context(aiohttp.ClientSession())
    api = KubernetesApi(session, Access("http://127.0.0.1:1", tmp_path / "token", None))
    await follow(KubernetesSource(api, "here", SERVICE, Random(1), QUICK)).problem("cannot be read")
