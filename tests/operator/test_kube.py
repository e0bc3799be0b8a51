"""Manifest -> Kubernetes objects: what runs, what it may, who reaches it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvist_connector import names
from kvist_connector.errors import ConfigError
from kvist_connector.quantity import parse_quantity
from kvist_operator import spec
from kvist_operator.plan import TOKEN
from kvist_operator.render.kube import CONFIG_HASH, READINESS_GATE, Context, generated_secrets
from kvist_operator.testing import CONTEXT, cluster, rendered

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
MONITORING = frozenset({"PodMonitor", "ServiceMonitor", "PrometheusRule"})
GIB = 1024**3
Objects = dict[tuple[str, str], dict[str, Any]]


def objects_of(context: Context = CONTEXT, **sections: Any) -> Objects:
    return rendered(cluster(**sections), context)


def pod(objects: Objects, kind: str = "StatefulSet", name: str = "test-engine") -> dict[str, Any]:
    return objects[kind, name]["spec"]["template"]["spec"]


def flag(container: dict[str, Any], name: str) -> str:
    return container["args"][container["args"].index(name) + 1]


def pods(objects: Objects) -> Iterator[dict[str, Any]]:
    for item in objects.values():
        template = item.get("spec", {}).get("template") if isinstance(item.get("spec"), dict) else None
        if template:
            yield template["spec"]


def containers(body: dict[str, Any]) -> list[dict[str, Any]]:
    return [*body.get("initContainers", ()), *body["containers"]]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_is_labelled_named_and_stable(path: Path) -> None:
    found = spec.load(path)
    context = replace(CONTEXT, kinds=MONITORING)
    first, second = rendered(found, context), rendered(found, context)
    assert json.dumps(list(first.values())) == json.dumps(list(second.values()))
    for (_, name), item in first.items():
        labels = item["metadata"]["labels"]
        assert name.startswith(f"{found.name}-")
        assert item["metadata"]["namespace"] == "apps"
        assert "ownerReferences" not in item["metadata"]
        assert labels["app.kubernetes.io/name"] == "kvist"
        assert labels["app.kubernetes.io/instance"] == found.name
        assert labels["app.kubernetes.io/managed-by"] == "kvist-operator"
        assert labels["app.kubernetes.io/component"] in name
    assert not TOKEN.search(json.dumps(list(first.values())))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_object_has_the_form_that_kubernetes_expects(path: Path) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    for item in rendered(spec.load(path)).values():
        validate.validate(item, "1.33", strict=True)


def test_the_autoscaler_of_the_examples_scales_a_cluster_of_them() -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    scaler = yaml.safe_load((ROOT / "examples" / "autoscaler" / "engines.yaml").read_text())
    validate.validate(scaler, "1.33", strict=True)
    target = scaler["spec"]["scaleTargetRef"]
    assert target == {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "name": spec.load(ROOT / "examples" / "hpa.yaml").name,
    }


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_pod_is_restricted(path: Path) -> None:
    for body in pods(rendered(spec.load(path))):
        assert body["securityContext"]["runAsNonRoot"] is True
        assert body["securityContext"]["runAsUser"] == body["securityContext"]["fsGroup"] > 0
        assert body["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in containers(body):
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False
            assert security["readOnlyRootFilesystem"] is True
            assert security["capabilities"] == {"drop": ["ALL"]}
        allowed = {"configMap", "emptyDir", "persistentVolumeClaim", "projected", "secret"}
        assert {kind for volume in body["volumes"] for kind in volume} - {"name"} <= allowed


def test_engines_start_at_once_and_are_replaced_by_the_operator_alone() -> None:
    found = objects_of(engine={"replicas": 3})["StatefulSet", "test-engine"]["spec"]
    assert (found["replicas"], found["podManagementPolicy"]) == (3, "Parallel")
    assert found["updateStrategy"] == {"type": "OnDelete"}
    lowered = objects_of(replace(CONTEXT, engine_replicas=2), engine={"replicas": 3})
    assert lowered["StatefulSet", "test-engine"]["spec"]["replicas"] == 2


def test_the_agent_is_a_sidecar_that_pays_for_the_arena() -> None:
    body = pod(objects_of(cache={"memory": "4Gi"}))
    (agent,) = body["initContainers"]
    assert agent["restartPolicy"] == "Always"
    assert agent["resources"]["requests"]["memory"] == agent["resources"]["limits"]["memory"]
    volume = next(item for item in body["volumes"] if item["name"] == "kvist")["emptyDir"]
    assert volume == {"medium": "Memory", "sizeLimit": str(4 * GIB + 64 * 1024**2)}
    assert int(agent["resources"]["limits"]["memory"]) > int(volume["sizeLimit"])
    # Arena and socket are in that one volume, which the engine shares; its /dev/shm is its own.
    engine = body["containers"][0]
    folder = {item["mountPath"] for item in engine["volumeMounts"] if item["name"] == "kvist"}.pop()
    assert flag(agent, "--arena").startswith(f"{folder}/")
    assert flag(agent, "--socket").startswith(f"{folder}/")
    assert flag(agent, "--socket") in flag(engine, "--kv-transfer-config")
    assert {"name": "shm", "mountPath": "/dev/shm"} in engine["volumeMounts"]
    assert {"name": "shm", "mountPath": "/dev/shm"} not in agent["volumeMounts"]


def test_slow_to_load_is_not_dead() -> None:
    engine = pod(objects_of(engine={"startupDeadline": "20m"}))["containers"][0]
    startup, liveness = engine["startupProbe"], engine["livenessProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] == 1200
    assert liveness["periodSeconds"] * liveness["failureThreshold"] <= 60


def test_an_engine_drains_before_it_goes_and_has_the_time_to() -> None:
    body = pod(objects_of(engine={"drainDeadline": "5m"}))
    engine, agent = body["containers"][0], body["initContainers"][0]
    command = engine["lifecycle"]["preStop"]["exec"]["command"]
    assert command[command.index("drain") :] == [
        "drain",
        "--socket",
        flag(agent, "--socket"),
        "--deadline",
        "300",
    ]
    assert body["terminationGracePeriodSeconds"] > 300
    assert body["readinessGates"] == [{"conditionType": READINESS_GATE}]


def test_plain_engines_have_neither_agent_nor_gate() -> None:
    objects = objects_of(cache={"enabled": False})
    body = pod(objects)
    assert "initContainers" not in body
    assert "readinessGates" not in body
    assert "exec" not in body["containers"][0]["lifecycle"]["preStop"]
    assert [port["name"] for port in objects["Service", "test-engine"]["spec"]["ports"]] == ["engine"]
    assert generated_secrets(cluster(cache={"enabled": False})) == ()


def test_what_engines_write_is_writable() -> None:
    engine = pod(objects_of())["containers"][0]
    mounts = [item["mountPath"] for item in engine["volumeMounts"] if not item.get("readOnly")]
    env = {item["name"]: item.get("value", "") for item in engine["env"]}
    for name in (
        "HOME",
        "HF_HOME",
        "VLLM_CACHE_ROOT",
        "TORCHINDUCTOR_CACHE_DIR",
        "TRITON_CACHE_DIR",
        "TMPDIR",
    ):
        assert any(env[name] == mount or env[name].startswith(f"{mount}/") for mount in mounts), name


def test_routers_find_engines_before_those_are_ready() -> None:
    objects = objects_of()
    service = objects["Service", "test-engine"]["spec"]
    assert service["clusterIP"] == "None"
    assert service["publishNotReadyAddresses"] is True
    settings = yaml.safe_load(objects["ConfigMap", "test-router"]["data"]["router.yaml"])
    assert settings["kubernetes"] == {"service": "test-engine", "namespace": "apps"}
    assert "replicas_file" not in settings
    (rule,) = objects["Role", "test-router"]["rules"]
    assert rule["resources"] == ["endpointslices"]
    assert (
        objects["RoleBinding", "test-router"]["subjects"][0]["name"]
        == pod(objects, "Deployment", "test-router")["serviceAccountName"]
    )
    assert pod(objects)["automountServiceAccountToken"] is False


def test_the_router_settings_are_what_the_router_takes() -> None:
    # The router's own class is not imported here: programs do not import each other, tests may.
    from kvist_router.settings import RouterSettings

    text = objects_of(model={"name": "o/m", "volume": {"claimName": "c"}})["ConfigMap", "test-router"]["data"]
    settings = RouterSettings.model_validate(yaml.safe_load(text["router.yaml"]))
    assert settings.kubernetes.service == "test-engine"
    assert str(settings.agent.token_file) == "/etc/kvist/token/token"
    assert str(settings.model.path) == "/models"


def test_the_agents_flags_are_what_the_agent_takes() -> None:
    from argparse import ArgumentParser

    from kvist_connector.agent.settings import AgentSettings
    from kvist_connector.settings import add_flags, load

    for path in EXAMPLES:
        found = spec.load(path)
        body = pod(rendered(found), name=f"{found.name}-engine")
        for agent in body.get("initContainers", ()):
            parser = ArgumentParser()
            add_flags(parser, AgentSettings)
            # As Kubernetes fills it in.
            parsed = parser.parse_args([word.replace("$(POD_IP)", "10.0.0.1") for word in agent["args"][2:]])
            assert load(AgentSettings, parsed, {}, names.ENV_AGENT).memory == found.spec.cache.memory


def test_a_new_router_configuration_is_a_new_pod_and_an_equal_one_is_not() -> None:
    def config(**router: Any) -> str:
        found = objects_of(router=router)["Deployment", "test-router"]["spec"]["template"]
        return found["metadata"]["annotations"][CONFIG_HASH]

    assert config() == config(replicas=2)
    assert config() != config(policy="round-robin")


def test_an_autoscaler_owns_the_routers_number_once_it_is_there() -> None:
    wished = {"autoscaling": {"maxReplicas": 6}}
    objects = objects_of(router=wished)
    assert objects["Deployment", "test-router"]["spec"]["replicas"] == 2
    assert objects["HorizontalPodAutoscaler", "test-router"]["spec"]["maxReplicas"] == 6
    owned = objects_of(replace(CONTEXT, router_replicas_owned_by_hpa=True), router=wished)
    assert "replicas" not in owned["Deployment", "test-router"]["spec"]
    without = objects_of(replace(CONTEXT, router_replicas_owned_by_hpa=True))
    assert without["Deployment", "test-router"]["spec"]["replicas"] == 1


def test_a_disk_tier_is_scratch_space_or_a_claim_by_replica() -> None:
    scratch = objects_of(cache={"disk": {"size": "10Gi"}})
    assert next(v for v in pod(scratch)["volumes"] if v["name"] == "disk")["emptyDir"]["sizeLimit"]
    template = {"storageClassName": "fast", "resources": {"requests": {"storage": "12Gi"}}}
    disk = {"size": "10Gi", "volumeClaimTemplate": template, "retention": {"whenScaled": "Retain"}}
    found = objects_of(cache={"disk": disk})["StatefulSet", "test-engine"]["spec"]
    assert found["volumeClaimTemplates"][0]["spec"] == {**template, "accessModes": ["ReadWriteOnce"]}
    assert found["persistentVolumeClaimRetentionPolicy"] == {"whenDeleted": "Delete", "whenScaled": "Retain"}
    assert "disk" not in [volume["name"] for volume in found["template"]["spec"]["volumes"]]


def test_a_model_in_a_volume_is_read_only_and_the_hub_is_not_asked() -> None:
    body = pod(objects_of(model={"name": "owner/model", "volume": {"claimName": "models", "path": "llama"}}))
    engine = body["containers"][0]
    assert flag(engine, "--model") == "/models/llama"
    assert {"name": "HF_HUB_OFFLINE", "value": "1"} in engine["env"]
    assert {"name": "model", "mountPath": "/models", "readOnly": True} in engine["volumeMounts"]


def test_gpus_are_asked_for_as_many_as_ranks() -> None:
    engine = pod(objects_of(engine={"device": "cuda", "tensorParallelSize": 4}))["containers"][0]
    assert engine["resources"]["limits"] == {"nvidia.com/gpu": "4"}
    given = {"limits": {"amd.com/gpu": 1}}
    automatic = pod(objects_of(engine={"resources": given}))["containers"][0]
    assert automatic["resources"]["limits"] == {"amd.com/gpu": "1"}
    assert "--enforce-eager" not in automatic["args"]
    cpu = pod(objects_of(engine={"resources": {"requests": {"cpu": "3500m"}}}))["containers"][0]
    assert {"name": "OMP_NUM_THREADS", "value": "4"} in cpu["env"]


def test_a_managed_redis_is_reached_by_pod_with_a_password_from_a_file() -> None:
    cache = {"remote": {"redis": {"managed": {"replicas": 2, "memory": "8Gi"}}}, "ttl": "1d"}
    objects = objects_of(cache=cache)
    agent = pod(objects)["initContainers"][0]
    assert flag(agent, "--redis.urls").split(",") == [
        f"redis://test-redis-{i}.test-redis.apps.svc:{names.PORT_REDIS}" for i in range(2)
    ]
    folders = {mount["mountPath"] for mount in agent["volumeMounts"]}
    assert flag(agent, "--redis.password-file").rpartition("/")[0] in folders
    redis = pod(objects, name="test-redis")["containers"][0]
    assert flag(redis, "--maxmemory") == str(8 * GIB)
    assert parse_quantity(redis["resources"]["requests"]["memory"]) > 8 * GIB
    assert [secret.name for secret in generated_secrets(cluster(cache=cache))] == ["test-token", "test-redis"]


def test_secrets_are_files_and_never_environment_or_arguments() -> None:
    remote = {
        "redis": {
            "urls": ["rediss://redis:6379"],
            "password": {"name": "login", "key": "pw"},
            "ca": {"name": "ca", "key": "ca.crt"},
            "sentinel": {"primary": "chunks", "password": {"name": "sentinels"}},
        },
        "objectStore": {"url": "s3://b/p", "credentials": {"name": "s3", "key": "file"}},
    }
    cache = {"remote": remote, "encryption": {"keys": {"name": "chunk-keys", "key": "all"}}}
    body = pod(objects_of(cache=cache, security={"token": {"name": "mine"}}))
    secrets = {item["name"]: item["secret"] for item in body["volumes"] if "secret" in item}
    assert {item["secretName"] for item in secrets.values()} == {
        "mine",
        "login",
        "ca",
        "sentinels",
        "s3",
        "chunk-keys",
    }
    agent = body["initContainers"][0]
    keys = agent["args"][agent["args"].index("--encryption.keys-file") + 1]
    mount = next(m for m in agent["volumeMounts"] if m["mountPath"] == str(Path(keys).parent))
    assert mount["readOnly"]
    assert secrets[mount["name"]]["items"] == [{"key": "all", "path": Path(keys).name}]
    assert not [v for c in containers(body) for v in c["env"] if "secretKeyRef" in str(v)]


def test_a_users_variable_may_come_from_a_secret_and_replaces_ours() -> None:
    source = {"secretKeyRef": {"name": "hub", "key": "token"}}
    env = [{"name": "HF_TOKEN", "valueFrom": source}, {"name": "HF_HOME", "value": "/models/hub"}]
    listed = pod(objects_of(engine={"env": env}))["containers"][0]["env"]
    assert {"name": "HF_TOKEN", "valueFrom": source} in listed
    assert [item["value"] for item in listed if item["name"] == "HF_HOME"] == ["/models/hub"]


def test_a_pod_template_is_laid_over_and_its_faults_are_named() -> None:
    template = {
        "spec": {"nodeSelector": {"gpu": "h200"}, "containers": [{"name": "engine", "command": ["/py"]}]}
    }
    body = pod(objects_of(engine={"podTemplate": template}))
    assert body["nodeSelector"] == {"gpu": "h200"}
    assert body["containers"][0]["command"] == ["/py"]
    assert body["containers"][0]["args"][0] == "-m"
    twice = {"spec": {"volumes": [{"name": "a", "emptyDir": {}}, {"name": "a", "emptyDir": {}}]}}
    with pytest.raises(ConfigError, match=r"spec\.router\.podTemplate\.spec\.volumes: name 'a'"):
        objects_of(router={"podTemplate": twice})


def test_disruption_budgets_never_protect_a_broken_pod() -> None:
    objects = objects_of(cache={"remote": {"redis": {"managed": {}}}})
    budgets = [item["spec"] for (kind, _), item in objects.items() if kind == "PodDisruptionBudget"]
    assert len(budgets) == 3
    assert {budget["unhealthyPodEvictionPolicy"] for budget in budgets} == {"AlwaysAllow"}


def test_routers_fetch_the_tokenizer_of_a_hub_model_with_the_engines_access() -> None:
    source = {"secretKeyRef": {"name": "hub", "key": "token"}}
    env = [{"name": "HF_TOKEN", "valueFrom": source}, {"name": "OTHER", "value": "x"}]
    objects = objects_of(model={"name": "owner/model", "revision": "abc"}, engine={"env": env})
    (fetch,) = pod(objects, "Deployment", "test-router")["initContainers"]
    settings = yaml.safe_load(objects["ConfigMap", "test-router"]["data"]["router.yaml"])
    assert fetch["args"][2:4] == ["download", "owner/model"]
    assert flag(fetch, "--local-dir") == settings["model"]["path"]
    engine = pod(objects, "StatefulSet", "test-engine")["containers"][0]
    assert flag(fetch, "--revision") == flag(engine, "--revision") == "abc"
    assert "*.safetensors" not in fetch["args"]
    assert {"name": "HF_TOKEN", "valueFrom": source} in fetch["env"]
    assert "OTHER" not in [item["name"] for item in fetch["env"]]
    volume = {"name": "owner/model", "volume": {"claimName": "models"}}
    assert "initContainers" not in pod(objects_of(model=volume), "Deployment", "test-router")
