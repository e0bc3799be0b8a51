"""A router that closed everything it can close: TLS to clients and to agents, API keys, tenants with rates.

One cluster of one engine for all tests of this file: an engine takes a minute to start. What a tenant does
not get, it does not get although its prompt went where it was computed.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from kvist_connector import names
from kvist_operator.render.kube.pods import TOKEN_FILE
from testbed.backends import certificate, certificate_files, secret
from testbed.client import Answer, Client, admin
from testbed.host_folders import Object
from testbed.kube import Kubectl
from testbed.load import prompts
from testbed.release import Helm, refusals, released
from testbed.scenario import cache_cluster
from testbed.small_pods import apply
from testbed.tenancy import Served, machine_tenant, served
from testbed.waiting import LONG_PAUSE, until

pytestmark = [pytest.mark.e2e_pod, pytest.mark.full, pytest.mark.timeout(1500)]
NAME = "demo"
HOST = "llm.example"
RESEARCH, BATCH, NOBODY, STRANGER = "key-of-research", "key-of-batch", "key-of-nobody", "no-key-at-all"
ADMIN = "token-of-the-admin-port"
A_MINUTE = 6  # requests of `batch`
REUSED = 512  # tokens of one prompt: what two chunks hold
# A mounted Secret changes within kubelet's period of a minute and what it keeps of the object for as long.
MOUNTED_SECONDS = 180


def hashed(*keys: str) -> str:
    """The text of a Secret with API keys."""
    return "".join(f"sha256:{hashlib.sha256(key.encode()).hexdigest()}\n" for key in keys)


def manifest() -> Object:
    made = cache_cluster(NAME)
    made["spec"]["engine"]["extraArgs"] = ["--enable-prompt-tokens-details"]
    made["spec"]["router"] |= {
        "auth": {"apiKeys": {"name": "keys"}, "adminToken": {"name": "admin"}},
        "tenants": [
            {"name": "research", "apiKeys": {"name": "research"}, "weight": 2, "cacheTokens": 100_000},
            {"name": "batch", "apiKeys": {"name": "batch"}, "priority": 10, "requestsPerMinute": A_MINUTE},
        ],
        "tls": certificate_files("router", "certificate", "privateKey"),
    }
    made["spec"]["security"] = {"agentTls": certificate_files("agents")}
    return made


@dataclass(frozen=True)
class Town:
    """A cluster, and a client of its router that has no key."""

    cluster: Served
    anybody: Client

    def client(self, key: str) -> Client:
        """One with a key."""
        return replace(self.anybody, key=key)

    def certificate(self) -> str:
        """What the router shows, PEM."""
        place = self.anybody.base.removeprefix("https://").partition(":")
        return ssl.get_server_certificate((place[0], int(place[2])), timeout=30)


@pytest.fixture(scope="module")
def town(kubectl: Kubectl, crd: str, node: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Town]:
    # By address: the machine does not resolve the name that the certificate has.
    trust = ssl.create_default_context(cafile=str(kubectl.bed.pki / "ca.crt"))
    trust.check_hostname = False
    with machine_tenant(kubectl) as namespace, released(Helm(kubectl), namespace):
        router, agents = (
            certificate(kubectl, f"{name}-{namespace}", host)
            for name, host in (("router", HOST), ("agents", "kvist-agent"))
        )
        apply(
            kubectl, namespace, secret("router", **router), secret("agents", **agents),
            secret("keys", token=hashed(NOBODY)), secret("research", token=hashed(RESEARCH)),
            secret("batch", token=hashed(BATCH)), secret("admin", token=ADMIN),
        )  # fmt: skip
        with served(kubectl, namespace, manifest(), tmp_path_factory.mktemp("story")) as cluster:
            cluster.settled(1200)
            plain = cluster.client()
            yield Town(cluster, replace(plain, base=plain.base.replace("http://", "https://"), trust=trust))
            assert refusals(kubectl, namespace) == []


@dataclass(frozen=True)
class Refused:
    """An error of the router."""

    status: int
    code: str
    retry_after: str


def refusal(client: Client) -> Refused | None:
    """What a request is refused with; None when it is answered."""
    try:
        with urllib.request.urlopen(client.completion("?", 1), timeout=120, context=client.trust):
            return None
    except urllib.error.HTTPError as error:
        said: dict[str, Any] = json.load(error)["error"]
        return Refused(error.code, said["code"], error.headers.get("Retry-After", ""))


def test_a_key_opens_and_nothing_else_does(town: Town) -> None:
    assert refusal(town.client("")) == Refused(401, "missing_api_key", "")
    assert refusal(town.client(STRANGER)) == Refused(401, "invalid_api_key", "")
    for key in (NOBODY, RESEARCH):
        assert town.client(key).complete("Which tree bears acorns?").tokens > 0
    plain = replace(town.anybody, base=town.anybody.base.replace("https://", "http://"), trust=None)
    with pytest.raises((urllib.error.URLError, http.client.HTTPException, OSError)):
        refusal(plain)


def test_the_admin_port_takes_its_own_token_alone(kubectl: Kubectl, town: Town) -> None:
    def status(path: str, token: str) -> int:
        return admin(kubectl, town.cluster.namespace, NAME, path, token)[0]

    assert status(names.PATH_DECISIONS, ADMIN) == 200
    for token in (TOKEN_FILE, RESEARCH):
        assert status(names.PATH_DECISIONS, token) == 401
    # The operator has none and sees the engines all the same, else the cluster would not be settled.
    assert status(names.PATH_REPLICAS, "none") == 200


def test_tenants_never_hit_each_others_state(town: Town) -> None:
    (prompt,) = prompts(["oak"])
    computed = town.client(RESEARCH).complete(prompt)
    assert warm(town.client(RESEARCH), prompt, computed)
    other = town.client(BATCH).complete(prompt)
    assert (other.text, other.reused, other.predicted) == (computed.text, 0, 0)
    assert warm(town.client(BATCH), prompt, computed)
    # A key without a tenant is no back door.
    third = town.client(NOBODY).complete(prompt)
    assert (third.text, third.reused, third.predicted) == (computed.text, 0, 0)


def warm(client: Client, prompt: str, computed: Answer) -> bool:
    """Whether the same is answered from what its owner computed."""
    answer = client.complete(prompt)
    assert answer.text == computed.text
    return answer.reused >= REUSED and answer.predicted >= REUSED


def test_a_tenant_has_its_rate_and_the_others_go_on(town: Town) -> None:
    found = [refusal(town.client(BATCH)) for _ in range(A_MINUTE + 1)]
    refused = [item for item in found if item is not None]
    assert refused
    assert {(item.status, item.code) for item in refused} == {(429, "rate_limit_exceeded")}
    assert all(0 < int(item.retry_after) <= 60 for item in refused)
    assert refusal(town.client(RESEARCH)) is None


def test_keys_and_certificates_change_while_the_router_runs(kubectl: Kubectl, town: Town) -> None:
    namespace, before, shown = town.cluster.namespace, routers(town), town.certificate()
    apply(
        kubectl, namespace, secret("research", token=hashed("next")),
        secret("router", **certificate(kubectl, f"router-{namespace}", HOST)),
    )  # fmt: skip

    def open_to(key: str) -> bool:
        return refusal(town.client(key)) is None

    until("the new key", lambda: open_to("next"), MOUNTED_SECONDS, pause=LONG_PAUSE)
    assert not open_to(RESEARCH)
    until("the new certificate", lambda: town.certificate() != shown, MOUNTED_SECONDS, pause=LONG_PAUSE)
    # The tenant is the same, and so is what it has.
    (prompt,) = prompts(["oak"])
    assert town.client("next").complete(prompt).reused >= REUSED
    assert routers(town) == before
    town.cluster.settled()


def routers(town: Town) -> list[str]:
    """Their pods."""
    return [pod["metadata"]["uid"] for pod in town.cluster.parts("router")]
