"""API keys and tenants: what the router is told, and from which Secrets its files come."""

from __future__ import annotations

from typing import Any

import yaml

from kvist_connector.settings import validate
from kvist_operator.render.kube import endpoint, generated_secrets
from kvist_operator.testing import CONTEXT, cluster, rendered
from kvist_router.settings import RouterSettings

ROUTER = {
    "auth": {"apiKeys": {"name": "everybody", "key": "list"}},
    "tenants": [
        {"name": "red", "apiKeys": {"name": "red-keys"}, "weight": 2, "tokensPerMinute": 1000},
        {"name": "blue", "apiKeys": {"name": "blue-keys"}, "priority": -1},
    ],
    "limits": {"requestsPerEngine": 32},
}


def settings(**router: Any) -> dict[str, Any]:
    files = rendered(cluster(router=router), CONTEXT)["ConfigMap", "test-router"]["data"]
    found: dict[str, Any] = yaml.safe_load(files["router.yaml"])
    return found


def pod(**router: Any) -> dict[str, Any]:
    found: dict[str, Any] = rendered(cluster(router=router), CONTEXT)["Deployment", "test-router"]
    body: dict[str, Any] = found["spec"]["template"]["spec"]
    return body


def test_the_router_reads_what_the_spec_says() -> None:
    found = validate(RouterSettings, settings(**ROUTER))
    assert found.admission.per_replica == 32
    assert str(found.auth.keys_file) == "/etc/kvist/access/keys"
    assert str(found.tenant.secret_file) == "/etc/kvist/access/secret"
    red, blue = found.tenants
    assert (red.name, str(red.keys_file)) == ("red", "/etc/kvist/access/tenant-red")
    assert (red.weight, red.tokens_per_minute, red.priority) == (2.0, 1000.0, 0)
    assert (blue.weight, blue.tokens_per_minute, blue.priority) == (1.0, None, -1)


def test_the_admin_port_has_a_token_of_its_own_and_the_operator_its_list() -> None:
    found = validate(RouterSettings, settings(auth={"adminToken": {"name": "admin"}}))
    assert str(found.admin_token_file) == "/etc/kvist/access/admin-token"
    assert found.admin_list_free
    (source,) = next(
        item for item in pod(auth={"adminToken": {"name": "admin"}})["volumes"] if item["name"] == "access"
    )["projected"]["sources"]
    assert (source["secret"]["name"], source["secret"]["items"]) == (
        "admin", [{"key": "token", "path": "admin-token"}]
    )  # fmt: skip
    # It lets nobody in at the OpenAI port, so there are no tenants either.
    assert found.tenant.secret_file is None


def test_files_come_from_the_secrets_named_and_one_that_the_operator_makes() -> None:
    body = pod(**ROUTER)
    sources = next(item for item in body["volumes"] if item["name"] == "access")["projected"]["sources"]
    files = {
        item["path"]: (source["secret"]["name"], item["key"])
        for source in sources
        for item in source["secret"]["items"]
    }
    assert files == {
        "keys": ("everybody", "list"),
        "tenant-red": ("red-keys", "token"),
        "tenant-blue": ("blue-keys", "token"),
        "secret": ("test-tenants", "secret"),
    }
    (container,) = body["containers"]
    assert {"name": "access", "mountPath": "/etc/kvist/access", "readOnly": True} in container["volumeMounts"]
    assert "test-tenants" in [item.name for item in generated_secrets(cluster(router=ROUTER))]
    assert "keys" not in str(container["args"] + container["env"])


def test_how_a_replica_is_chosen_is_the_routers_setting() -> None:
    given = {
        "policy": "prefix-affinity",
        "shadows": ["kvist", "round-robin"],
        "weights": {"bound": 2, "tieSeconds": 0.01},
        "limits": {"continuations": 1},
        "tenants": [{"name": "red", "apiKeys": {"name": "red-keys"}, "cacheTokens": 5000}],
    }
    found = validate(RouterSettings, settings(**given))
    assert found.shadows == ("kvist", "round-robin")
    assert (found.weights.bound, found.weights.tie_seconds, found.weights.standstill) == (2, 0.01, 0.5)
    assert found.limits.continuations == 1
    assert found.tenants[0].cache_tokens == 5000


def test_how_many_processes_a_router_has_is_said_or_left_to_it() -> None:
    assert [settings(relays=count)["relays"] for count in (0, 2)] == [0, 2]
    assert validate(RouterSettings, settings(relays=2)).relays == 2
    assert "relays" not in settings()


def test_without_keys_there_is_neither_a_folder_nor_a_secret() -> None:
    assert not {"auth", "tenant", "tenants", "admission"} & settings().keys()
    assert "access" not in [item["name"] for item in pod()["volumes"]]
    assert "test-tenants" not in [item.name for item in generated_secrets(cluster())]


def test_tls_is_served_with_the_secrets_named_and_probed_as_such() -> None:
    tls = {
        "certificate": {"name": "router-tls", "key": "tls.crt"},
        "privateKey": {"name": "router-tls", "key": "tls.key"},
    }
    found = validate(RouterSettings, settings(tls=tls))
    assert str(found.tls.certificate_file) == "/etc/kvist/access/tls.crt"
    assert str(found.tls.key_file) == "/etc/kvist/access/tls.key"
    assert not found.tls.admin  # the operator asks there
    body = pod(tls=tls)
    access = next(item for item in body["volumes"] if item["name"] == "access")
    assert [source["secret"]["items"] for source in access["projected"]["sources"]] == [
        [{"key": file, "path": file}] for file in ("tls.crt", "tls.key")
    ]
    (container,) = body["containers"]
    probes = [container[name]["httpGet"] for name in ("startupProbe", "livenessProbe", "readinessProbe")]
    assert [probe["scheme"] for probe in probes] == ["HTTPS"] * 3
    assert "test-tenants" not in [item.name for item in generated_secrets(cluster(router={"tls": tls}))]
    assert "scheme" not in str(pod()["containers"][0]["readinessProbe"])


def test_the_status_names_the_scheme() -> None:
    assert endpoint("a", "b") == "http://a-router.b.svc:8080"
    assert endpoint("a", "b", tls=True) == "https://a-router.b.svc:8080"
