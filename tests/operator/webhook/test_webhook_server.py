"""The webhook over real TLS: reviews, bad bodies, and a certificate that is replaced while it serves."""

from __future__ import annotations

import datetime
import gzip
import io
import json
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from kvist_connector.errors import ConfigError
from kvist_operator.render.kube import Context, Images
from kvist_operator.webhook import certificates
from kvist_operator.webhook.certificates import Material
from kvist_operator.webhook.rotation import LIFETIMES
from kvist_operator.webhook.server import MOST_BYTES, PATH_VALIDATE, Tls, listening

CONTEXT = Context("", "", Images("engine", "router", "agent", "redis"))
NAMES = ("localhost", "127.0.0.1")
NOW = datetime.datetime.now(datetime.UTC)


def made() -> Material:
    """A new authority and a certificate by it."""
    return certificates.add_serving(
        certificates.add_authority(Material(), frozenset(), NOW, LIFETIMES), NAMES, NOW, LIFETIMES
    )


@dataclass
class Webhook:
    port: int
    tls: Tls

    def serve(self, material: Material) -> None:
        found = certificates.write(material)
        self.tls.load(found["tls.crt"], found["tls.key"])

    async def post(self, material: Material, body: bytes, **headers: str) -> tuple[int, Any]:
        """As an API server that trusts the authorities of `material`."""
        trust = ssl.create_default_context(cadata=certificates.bundle(material.authorities).decode())
        url = f"https://localhost:{self.port}{PATH_VALIDATE}"
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(30), trust_env=False) as session,
            session.post(url, data=io.BytesIO(body), ssl=trust, headers=headers) as answer,
        ):
            said = await answer.read()
            return answer.status, await answer.json() if answer.status == 200 else said.decode()


@pytest.fixture
async def webhook() -> AsyncIterator[Webhook]:
    tls = Tls()
    async with listening("localhost", 0, CONTEXT, tls) as port:
        yield Webhook(port, tls)


def request(**cache: Any) -> bytes:
    obj = {
        "apiVersion": "kvist.dev/v1alpha1",
        "kind": "CacheCluster",
        "metadata": {"name": "demo", "namespace": "team"},
        "spec": {"model": {"name": "owner/Model-8B"}, "cache": cache},
    }
    return _review({"uid": "1", "operation": "CREATE", "object": obj, "oldObject": None})


def _review(body: dict[str, Any]) -> bytes:
    return json.dumps(
        {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": body}
    ).encode()


async def test_a_review_is_answered_to_whoever_trusts_the_authority(webhook: Webhook) -> None:
    material = made()
    webhook.serve(material)
    status, answer = await webhook.post(material, request(memory="8Mi"))
    assert status == 200
    assert answer["response"]["allowed"] is True
    assert "spec.cache.memory: 8Mi" in answer["response"]["warnings"][0]
    with pytest.raises(aiohttp.ClientConnectorCertificateError):
        await webhook.post(made(), request())


async def test_new_connections_get_a_new_certificate(webhook: Webhook) -> None:
    first, second = made(), made()
    webhook.serve(first)
    assert (await webhook.post(first, request()))[0] == 200
    webhook.serve(second)
    assert (await webhook.post(second, request()))[0] == 200
    with pytest.raises(aiohttp.ClientConnectorCertificateError):
        await webhook.post(first, request())


async def test_without_a_certificate_there_is_no_answer(webhook: Webhook) -> None:
    with pytest.raises(aiohttp.ClientConnectorError):
        await webhook.post(made(), request())


async def test_a_key_of_another_certificate_changes_nothing(webhook: Webhook) -> None:
    material, other = made(), certificates.write(made())
    webhook.serve(material)
    with pytest.raises(ValueError, match="cannot be served"):
        webhook.tls.load(certificates.write(material)["tls.crt"], other["tls.key"])
    assert (await webhook.post(material, request()))[0] == 200


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b"\xff\xfe", 400),
        (b"[" * 100_000, 400),
        (b"{}", 400),
        (_review({"uid": "1"}), 400),
        (b" " * (MOST_BYTES + 1), 413),
    ],
)
async def test_bodies_that_are_no_review_are_refused(webhook: Webhook, body: bytes, status: int) -> None:
    material = made()
    webhook.serve(material)
    assert (await webhook.post(material, body))[0] == status


async def test_a_port_that_is_taken_is_said(webhook: Webhook) -> None:
    with pytest.raises(ConfigError, match=r"webhook\.port: cannot listen"):
        async with listening("localhost", webhook.port, CONTEXT, Tls()):
            pass


async def test_a_body_that_says_it_is_packed_is_refused_whatever_it_is(webhook: Webhook) -> None:
    material = made()
    webhook.serve(material)
    for body in (b"no gzip", gzip.compress(request())):
        status, said = await webhook.post(material, body, **{"Content-Encoding": "gzip"})
        assert status == 400, said
