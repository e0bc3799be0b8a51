"""charts/kvist as helm renders it: what is installed, with which rights, from which values."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvist_connector.settings import validate
from kvist_operator.control.resources import OPTIONAL_KINDS, managed
from kvist_operator.render.kube import MANAGER
from kvist_operator.settings import LeaseSettings, OperatorSettings
from kvist_operator.webhook.run import place
from kvist_operator.webhook.server import PATH_VALIDATE

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "kvist"
SNAPSHOTS = Path(__file__).parent / "snapshots"
DIGEST = f"sha256:{'0a' * 32}"
SETS = {
    "default": [],
    "namespaced": ["watchNamespaces={team-a,team-b}", "replicas=1"],
    "mirrored": [
        f"image.digest={DIGEST}",
        f"images.engine.digest={DIGEST}",
        "images.agent.repository=registry.example.com/kvist/agent",
        "imagePullSecrets={registry}",
        "images.pullSecrets={registry}",
        "metrics.podMonitor=true",
        "metrics.prometheusRule=true",
        "settings.workers=4",
        "logLevel=debug",
    ],
    "webhook": ["webhook.enabled=true", "watchNamespaces={team-a,team-b}", "webhook.port=9443"],
}


@pytest.fixture(scope="module")
def helm() -> str:
    tools = Path(os.environ.get("KVIST_TOOLS", Path.home() / ".cache" / "kvist" / "tools"))
    found = [str(path) for path in sorted(tools.glob("helm-*/helm"))] or [shutil.which("helm") or ""]
    if not found[-1]:
        pytest.skip(f"helm is neither in {tools} nor on PATH: `e2e/build helm` builds it")
    return found[-1]


def run(helm: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([helm, *arguments], capture_output=True, text=True, timeout=60, check=False)


def template(helm: str, values: list[str], *, crds: bool = False) -> str:
    given = [f"crds.enabled={str(crds).lower()}", *values]
    sets = [word for value in given for word in ("--set", value)]
    fixed = ("--namespace=kvist-system", "--kube-version=1.33.0")
    done = run(helm, "template", "kvist", str(CHART), *fixed, *sets)
    assert done.returncode == 0, done.stderr
    return done.stdout


def objects(helm: str, values: list[str], *, crds: bool = False) -> list[dict[str, Any]]:
    return [item for item in yaml.safe_load_all(template(helm, values, crds=crds)) if item]


def of_kind(found: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [item for item in found if item["kind"] == kind]


def test_the_charts_crd_is_the_one_of_the_spec() -> None:
    source = (ROOT / "crds" / "cachecluster.yaml").read_text()
    copy = (CHART / "files" / "cachecluster.yaml").read_text()
    assert copy == source, "run `cp crds/cachecluster.yaml charts/kvist/files/`"


def test_a_cluster_that_is_not_ready_is_listed_with_the_reason() -> None:
    document = yaml.safe_load((ROOT / "crds" / "cachecluster.yaml").read_text())
    columns = {item["name"]: item for item in document["spec"]["versions"][0]["additionalPrinterColumns"]}
    assert columns["Reason"]["jsonPath"] == '.status.conditions[?(@.type=="Ready")].reason'
    assert columns["Reason"]["priority"] == 1  # with --output=wide


def test_the_crd_is_a_template_that_an_uninstall_keeps(helm: str) -> None:
    (crd,) = of_kind(objects(helm, [], crds=True), "CustomResourceDefinition")
    assert crd["metadata"].pop("annotations") == {"helm.sh/resource-policy": "keep"}
    assert crd == yaml.safe_load((ROOT / "crds" / "cachecluster.yaml").read_text())


def test_helm_finds_nothing_to_complain_about(helm: str) -> None:
    done = run(helm, "lint", "--strict", str(CHART))
    assert done.returncode == 0, done.stdout
    assert "[WARNING]" not in done.stdout


@pytest.mark.parametrize(
    ("served", "namespace"),
    [("watchNamespaces={team-a,team-b}", " -n team-a"), ("replicas=2", "")],
)
def test_the_notes_put_the_first_cluster_where_an_operator_looks(
    helm: str, served: str, namespace: str
) -> None:
    done = run(helm, "install", "kvist", str(CHART), "--dry-run=client", "--set", served)
    assert done.returncode == 0, done.stderr
    for command in ("apply{} -f -", "wait --for=condition=Ready cc/first{} --", "describe cc first{}\n"):
        assert f"kubectl {command.format(namespace)}" in done.stdout


@pytest.mark.parametrize(
    "value",
    [
        "replica=3",
        "replicas=two",
        "image.digest=latest",
        "images.engine.name=x",
        "images.engine.pullPolicy=Never",
        "logLevel=loud",
        "settings.images.engine=x",
        "settings.imags.engine=x",
        "settings.workesr=4",
        "settings.lease.name=other",
        "settings.lease.duration=30",
        "settings.webhook.port=1",
        "webhook.port=80",
        "webhook.failurePolicy=Fail",
        "crds.keep=true",
    ],
)
def test_values_that_mean_nothing_are_refused(helm: str, value: str) -> None:
    assert run(helm, "lint", str(CHART), "--set", value).returncode != 0


def test_the_operators_settings_that_the_chart_passes_on_are_all_but_its_own() -> None:
    listed = json.loads((CHART / "values.schema.json").read_text())["properties"]["settings"]["properties"]
    own = {"namespace", "watch_namespaces", "port", "docs_url", "log_level", "images", "webhook"}
    assert listed.keys() == OperatorSettings.model_fields.keys() - own
    assert listed["lease"]["properties"].keys() == LeaseSettings.model_fields.keys() - {"name"}


@pytest.mark.parametrize("name", SETS)
def test_what_is_installed_changes_only_on_purpose(helm: str, name: str) -> None:
    path, text = SNAPSHOTS / f"{name}.yaml", template(helm, SETS[name])
    if os.environ.get("KVIST_WRITE_SNAPSHOTS"):
        path.write_text(text)
    assert path.read_text() == text, "look at the difference, then run with KVIST_WRITE_SNAPSHOTS=1"


@pytest.mark.parametrize("name", SETS)
def test_every_object_has_the_form_that_kubernetes_expects(helm: str, name: str) -> None:
    checker = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    for item in objects(helm, SETS[name]):
        if item["kind"] not in OPTIONAL_KINDS:
            checker.validate(item, "1.33", strict=True)


@pytest.mark.parametrize("name", SETS)
def test_the_operator_takes_the_settings_that_the_chart_writes(helm: str, name: str) -> None:
    (config,) = of_kind(objects(helm, SETS[name]), "ConfigMap")
    settings = validate(OperatorSettings, yaml.safe_load(config["data"]["operator.yaml"]))
    assert settings.namespace == "kvist-system"
    (lease,) = of_kind(objects(helm, SETS[name]), "Lease")
    assert settings.lease.name == lease["metadata"]["name"]
    (deployment,) = of_kind(objects(helm, SETS[name]), "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["ports"][0]["containerPort"] == settings.port


def test_a_namespaced_operator_has_no_right_outside(helm: str) -> None:
    found = objects(helm, SETS["namespaced"])
    assert not [item for item in found if item["kind"].startswith("ClusterRole")]
    places = {item["metadata"]["namespace"] for item in of_kind(found, "RoleBinding")}
    assert places == {"team-a", "team-b", "kvist-system"}


def test_rights_cover_every_kind_that_is_managed_and_name_each_verb(helm: str) -> None:
    rules = [rule for role in of_kind(objects(helm, []), "ClusterRole")[:1] for rule in role["rules"]]
    granted = {
        (group, resource): set(rule["verbs"])
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }
    for kind in managed(OPTIONAL_KINDS):
        wanted = {"get", "list", "watch", "create", "patch", "delete"}
        assert granted[kind.group, kind.plural] == wanted, kind.plural
    assert granted["", "secrets"] == {"get", "create"}
    assert granted["", "pods"] == {"list", "watch"}
    assert not [rule for rule in rules if "*" in (*rule["verbs"], *rule["resources"], *rule["apiGroups"])]


def test_the_webhook_never_stands_in_the_way(helm: str) -> None:
    (configuration,) = of_kind(objects(helm, SETS["webhook"]), "ValidatingWebhookConfiguration")
    (hook,) = configuration["webhooks"]
    assert (hook["failurePolicy"], hook["timeoutSeconds"], hook["sideEffects"]) == ("Ignore", 5, "None")
    assert hook["rules"][0]["operations"] == ["CREATE", "UPDATE"]
    assert "deletionTimestamp" in hook["matchConditions"][0]["expression"]
    assert hook["namespaceSelector"]["matchExpressions"][0]["values"] == ["team-a", "team-b"]
    assert "caBundle" not in hook["clientConfig"]  # an upgrade leaves what the operator wrote


def test_the_operator_finds_the_webhooks_objects_by_the_names_that_the_chart_gives(helm: str) -> None:
    found = objects(helm, SETS["webhook"])
    (config,) = of_kind(found, "ConfigMap")
    settings = validate(OperatorSettings, yaml.safe_load(config["data"]["operator.yaml"]))
    (configuration,) = of_kind(found, "ValidatingWebhookConfiguration")
    service = configuration["webhooks"][0]["clientConfig"]["service"]
    at = place(settings)
    assert at.configuration == configuration["metadata"]["name"]
    assert at.names == (f"{service['name']}.{service['namespace']}.svc",)
    assert service["path"] == PATH_VALIDATE
    (secret,) = of_kind(found, "Secret")
    assert (at.namespace, at.secret) == (secret["metadata"]["namespace"], secret["metadata"]["name"])
    assert "data" not in secret  # an upgrade leaves what the operator wrote
    (deployment,) = of_kind(found, "Deployment")
    ports = {
        port["name"]: port["containerPort"]
        for port in deployment["spec"]["template"]["spec"]["containers"][0]["ports"]
    }
    assert ports["webhook"] == settings.webhook.port == 9443


def test_the_webhooks_rights_are_to_its_own_objects_by_name(helm: str) -> None:
    found = objects(helm, SETS["webhook"])
    (role,) = [item for item in of_kind(found, "Role") if item["metadata"]["name"] == "kvist-webhook"]
    (rule,) = role["rules"]
    assert (rule["resources"], rule["resourceNames"], rule["verbs"]) == (
        ["secrets"],
        ["kvist-webhook"],
        ["get", "update"],
    )
    (cluster_role,) = of_kind(found, "ClusterRole")
    (rule,) = cluster_role["rules"]
    assert rule["resources"] == ["validatingwebhookconfigurations"]
    assert rule["resourceNames"] == ["kvist-system-kvist-webhook"]
    assert rule["verbs"] == ["get", "patch"]
    off = objects(helm, [])
    assert not of_kind(off, "ValidatingWebhookConfiguration") + of_kind(off, "Secret")


@pytest.mark.parametrize("name", SETS)
def test_its_pods_are_restricted(helm: str, name: str) -> None:
    found = objects(helm, SETS[name])
    programs = of_kind(found, "Deployment") + of_kind(found, "Job")
    bodies = [item["spec"]["template"]["spec"] for item in programs]
    for body in (*bodies, *(item["spec"] for item in of_kind(found, "Pod"))):
        assert body["securityContext"]["runAsNonRoot"] is True
        for container in body["containers"]:
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


@pytest.mark.parametrize("name", ["default", "namespaced"])
def test_before_an_uninstall_a_job_of_its_own_frees_the_clusters(helm: str, name: str) -> None:
    hooks = [
        item
        for item in objects(helm, SETS[name])
        if item["metadata"].get("annotations", {}).get("helm.sh/hook") == "pre-delete"
    ]
    (job,) = of_kind(hooks, "Job")
    body = job["spec"]["template"]["spec"]
    assert body["containers"][0]["command"][2:] == ["kvist_operator", "release"]
    assert body["containers"][0]["args"][-2:] == ["--deployment", "kvist"]
    (account,) = of_kind(hooks, "ServiceAccount")
    assert body["serviceAccountName"] == account["metadata"]["name"] == "kvist-release"
    granted = {
        (resource, verb, *rule.get("resourceNames", ()))
        for role in of_kind(hooks, "Role") + of_kind(hooks, "ClusterRole")
        for rule in role["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert granted == {
        ("cacheclusters", "get"),
        ("cacheclusters", "list"),
        ("cacheclusters", "patch"),
        ("deployments/scale", "patch", "kvist"),
        ("leases", "create"),
        ("leases", "get", "kvist"),
        ("leases", "update", "kvist"),
    }
    weights = {item["kind"]: int(item["metadata"]["annotations"]["helm.sh/hook-weight"]) for item in hooks}
    assert max(weights, key=weights.__getitem__) == "Job"


def test_the_hook_can_be_left_out(helm: str) -> None:
    assert not of_kind(objects(helm, ["uninstall.release=false"]), "Job")


def test_clusters_admit_the_operators_pods_by_their_label(helm: str) -> None:
    (deployment,) = of_kind(objects(helm, []), "Deployment")
    assert deployment["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/name"] == MANAGER


def test_a_digest_wins_over_the_tag(helm: str) -> None:
    (deployment,) = of_kind(objects(helm, SETS["mirrored"]), "Deployment")
    body = deployment["spec"]["template"]["spec"]
    assert body["containers"][0]["image"] == f"ghcr.io/kvist/operator@{DIGEST}"
    assert body["imagePullSecrets"] == [{"name": "registry"}]
