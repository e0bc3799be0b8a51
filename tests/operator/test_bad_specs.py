"""What cannot work is refused in words, by the operator and, where it can know, by the API server."""

from __future__ import annotations

import os
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvist_connector.errors import ConfigError
from kvist_operator import spec
from kvist_operator.plan import kube_target, make_plan
from kvist_operator.render.kube import Context, Images, render
from kvist_operator.spec.kube_checks import kube_violation

CASES: list[dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("bad_specs.yaml").read_text())
VALID = {
    "apiVersion": "kvist.dev/v1alpha1",
    "kind": "CacheCluster",
    "metadata": {"name": "bad"},
    "spec": {"model": {"name": "owner/model"}},
}
CONTEXT = Context("default", "0", Images("engine", "router", "agent", "redis"))


def merged(base: Any, change: Any) -> Any:
    """JSON merge patch."""
    if not isinstance(change, dict):
        return deepcopy(change)
    result = dict(base) if isinstance(base, dict) else {}
    for key, value in change.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merged(result.get(key), value)
    return result


def verdict(manifest: dict[str, Any]) -> str:
    """What the operator says before it applies anything; empty when it would apply."""
    try:
        cluster = spec.parse(manifest)
        target = kube_target(cluster)
        violation = kube_violation(cluster, cpu=target.device == "cpu")
        if violation is None:
            render(cluster, make_plan(cluster, target), CONTEXT)
    except ConfigError as error:
        return str(error)
    return str(violation or "")


def named(cases: list[dict[str, Any]]) -> list[Any]:
    return [pytest.param(case, id=case["name"].replace(" ", "-")) for case in cases]


@pytest.mark.parametrize("case", named([case for case in CASES if "operator" in case]))
def test_the_operator_says_what_is_wrong(case: dict[str, Any]) -> None:
    text = verdict(merged(VALID, case["change"]))
    assert case["operator"] in text
    assert len(text) < 500


def test_the_manifest_that_the_cases_change_is_valid() -> None:
    assert verdict(VALID) == ""
    assert len(CASES) >= 20


@pytest.fixture(scope="module")
def clusters() -> Iterator[Any]:
    """The CacheClusters of a real API server that has the CRD of this checkout."""
    if not os.environ.get("KUBECONFIG"):
        pytest.skip("no API server: KUBECONFIG is not set")
    from kubernetes import client, config

    config.load_kube_config()
    api = client.ApiClient()
    crds = client.ApiextensionsV1Api(api)
    found = crds.read_custom_resource_definition("cacheclusters.kvist.dev")
    crd = yaml.safe_load((Path(__file__).parents[2] / "crds" / "cachecluster.yaml").read_text())
    crd["metadata"]["resourceVersion"] = found.metadata.resource_version
    crds.replace_custom_resource_definition(crd["metadata"]["name"], crd)
    yield client.CustomObjectsApi(api)
    api.rest_client.pool_manager.clear()


@pytest.mark.parametrize("case", named([case for case in CASES if "before" not in case]))
def test_the_api_server_says_what_its_schema_can_know(clusters: Any, case: dict[str, Any]) -> None:
    said = refusal(clusters, merged(VALID, case["change"]))
    assert case["api"] in said if "api" in case else said == ""


def refusal(clusters: Any, manifest: dict[str, Any]) -> str:
    from kubernetes.client.exceptions import ApiException

    place = ("kvist.dev", "v1alpha1", "default", "cacheclusters")
    try:
        clusters.create_namespaced_custom_object(*place, manifest, dry_run="All", field_validation="Strict")
    except ApiException as error:
        return str(error.body).replace('\\"', '"')
    return ""


@pytest.mark.parametrize("case", named([case for case in CASES if "before" in case]))
def test_the_api_server_refuses_what_cannot_change(clusters: Any, case: dict[str, Any]) -> None:
    from kubernetes.client.exceptions import ApiException

    place = ("kvist.dev", "v1alpha1", "default", "cacheclusters")
    clusters.create_namespaced_custom_object(*place, merged(VALID, case["before"]))
    try:
        with pytest.raises(ApiException) as refused:
            clusters.patch_namespaced_custom_object(*place, VALID["metadata"]["name"], case["change"])  # type: ignore[index]
        assert case["api"] in str(refused.value.body)
    finally:
        clusters.delete_namespaced_custom_object(*place, VALID["metadata"]["name"])  # type: ignore[index]
