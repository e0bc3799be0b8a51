"""Manifest -> plan -> processes: which programs, with which arguments, where."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from kvist_connector.engines.vllm.config import ExtraConfig
from kvist_connector.settings import validate
from kvist_operator.crd import render as render_crd
from kvist_operator.plan import TOKEN, cpu_target, cuda_target, make_plan
from kvist_operator.render.local import EVENTS_SUFFIX, SOCKET_PATH_LIMIT, Machine, Process, render
from kvist_operator.testing import cluster

ROOT = Path(__file__).parents[2]
MACHINE = Machine(
    run_dir=Path("/run/kvist/test"),
    arena_dir=Path("/dev/shm"),
    host="0.0.0.0",
    ports={
        "router": 8080,
        "router-admin": 8081,
        "engine": 8100,
        "agent": 8200,
    },
    python="/usr/bin/python3",
    model="/models/smollm2",
)
CPU = cpu_target(4, offline=True)


def processes(machine: Machine = MACHINE, **sections: Any) -> dict[str, Process]:
    return {p.name: p for p in render(make_plan(cluster(**sections), CPU), machine)}


def flag(process: Process, name: str) -> str:
    return process.argv[process.argv.index(name) + 1]


def test_two_replicas_are_two_agents_two_engines_and_a_router_in_order() -> None:
    found = processes(engine={"replicas": 2})
    assert {name: p.after for name, p in found.items()} == {
        "agent-0": (),
        "agent-1": (),
        "engine-0": ("agent-0",),
        "engine-1": ("agent-1",),
        "router": ("engine-0", "engine-1"),
    }
    ports = [port for p in found.values() for port in p.ports.values()]
    assert len(ports) == len(set(ports))
    assert found["engine-1"].url == "http://127.0.0.1:8101"
    assert found["agent-1"].health_url == "http://127.0.0.1:8201/healthz"


def test_the_engine_gets_connector_events_and_the_agents_socket() -> None:
    found = processes(engine={"replicas": 2, "kvCacheMemory": "512Mi", "extraArgs": ["--max-num-seqs", "8"]})
    engine, agent = found["engine-1"], found["agent-1"]
    assert json.loads(flag(engine, "--kv-transfer-config")) == {
        "kv_connector": "KvistConnector",
        "kv_connector_module_path": "kvist_connector.engines.vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"agent": flag(agent, "--socket")},
    }
    events = json.loads(flag(engine, "--kv-events-config"))
    assert events["enable_kv_cache_events"] is True
    assert events["endpoint"] == flag(agent, "--kv-events") == f"ipc://{agent.socket}.events"
    assert events["replay_endpoint"] == flag(agent, "--kv-events-replay") == f"ipc://{agent.socket}.replay"
    assert flag(engine, "--kv-cache-memory-bytes") == str(512 * 1024**2)
    assert engine.unset == ("VLLM_CPU_KVCACHE_SPACE",)
    assert engine.argv[-2:] == ("--max-num-seqs", "8")
    # Engines, agents and the admin port are for this machine only, whatever the router listens on.
    assert flag(engine, "--host") == flag(agent, "--http.host") == "127.0.0.1"


def test_a_cpu_engine_gets_what_cpus_need_and_a_gpu_engine_does_not() -> None:
    cpu = make_plan(cluster(), CPU).engine
    gpu = make_plan(cluster(), cuda_target(offline=False)).engine
    assert {"--block-size", "--enforce-eager", "--kv-cache-memory-bytes"} <= set(cpu.argv)
    assert not {"--block-size", "--enforce-eager", "--kv-cache-memory-bytes"} & set(gpu.argv)
    assert cpu.env["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert cpu.env["OMP_NUM_THREADS"] == "4"
    assert "OMP_NUM_THREADS" not in gpu.env


def test_devices_are_dealt_out_in_order() -> None:
    plan = make_plan(cluster(engine={"replicas": 2, "tensorParallelSize": 2}), cuda_target(offline=True))
    found = {p.name: p for p in render(plan, replace(MACHINE, devices=("0", "1", "2", "5")))}
    assert found["engine-0"].env["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert found["engine-1"].env["CUDA_VISIBLE_DEVICES"] == "2,5"


def test_without_cache_there_are_plain_engines_and_no_agent() -> None:
    found = processes(cache={"enabled": False}, router={"policy": "round-robin"})
    assert list(found) == ["engine-0", "router"]
    assert not [a for a in found["engine-0"].argv if a.startswith(("--kv-transfer", "--kv-events"))]
    assert found["engine-0"].ports == {"engine": 8100}


def test_the_router_gets_its_settings_and_the_list_of_replicas() -> None:
    router = processes(engine={"replicas": 2}, router={"policy": "least-load"})["router"]
    settings = yaml.safe_load(router.files[Path("/run/kvist/test/router.yaml")])
    assert settings["policy"] == "least-load"
    assert (settings["host"], settings["port"]) == ("0.0.0.0", 8080)
    assert (settings["admin_host"], settings["admin_port"]) == ("127.0.0.1", 8081)
    assert settings["model"] == {"path": "/models/smollm2"}
    assert yaml.safe_load(router.files[Path(settings["replicas_file"])]) == [
        {"name": "replica-0", "url": "http://127.0.0.1:8100", "agent": "http://127.0.0.1:8200"},
        {"name": "replica-1", "url": "http://127.0.0.1:8101", "agent": "http://127.0.0.1:8201"},
    ]
    assert router.url == "http://127.0.0.1:8080"


def test_the_disk_tier_is_in_the_run_folder_or_where_the_manifest_says() -> None:
    inside = processes(cache={"disk": {"size": "1Gi"}})["agent-0"]
    assert inside.disk == Path("/run/kvist/test/replica-0/disk")
    outside = processes(cache={"disk": {"size": "1Gi", "path": "/nvme"}})["agent-0"]
    assert flag(outside, "--disk.path") == "/nvme/test/replica-0"
    assert flag(outside, "--disk.size") == str(1024**3)
    assert "--disk.path" not in processes()["agent-0"].argv


def test_adapters_are_named_with_their_folders() -> None:
    model = {"name": "owner/model", "loraAdapters": [{"name": "sql", "path": "owner/sql"}]}
    machine = replace(MACHINE, lora={"sql": "/adapters/sql"})
    engine = processes(machine, model=model)["engine-0"]
    assert json.loads(flag(engine, "--lora-modules")) == {"name": "sql", "path": "/adapters/sql"}


def test_revisions_of_adapters_reach_the_connectors_keys() -> None:
    adapters = [
        {"name": "sql", "path": "owner/sql", "revision": "v2"},
        {"name": "chat", "path": "owner/chat"},
    ]
    machine = replace(MACHINE, lora={"sql": "/adapters/sql", "chat": "/adapters/chat"})
    engine = processes(machine, model={"name": "owner/model", "loraAdapters": adapters})["engine-0"]
    extra = json.loads(flag(engine, "--kv-transfer-config"))["kv_connector_extra_config"]
    assert extra["lora_revisions"] == {"sql": "v2"}
    assert validate(ExtraConfig, extra).lora_revisions == {"sql": "v2"}


def test_the_revision_of_a_hub_model_reaches_vllm_and_that_of_a_folder_the_keys_only() -> None:
    def engine(**model: Any) -> Process:
        return processes(model=model)["engine-0"]

    assert flag(engine(name="owner/model", revision="abc"), "--revision") == "abc"
    volume = {"claimName": "models"}
    for argv in (
        engine(name="owner/model").argv,
        engine(name="/models/a", revision="abc").argv,
        engine(name="owner/model", revision="abc", volume=volume).argv,
    ):
        assert "--revision" not in argv
    extra = flag(engine(name="/models/a", revision="abc"), "--kv-transfer-config")
    assert json.loads(extra)["kv_connector_extra_config"]["revision"] == "abc"


def test_a_long_run_folder_still_gives_a_socket_that_can_be_bound() -> None:
    found = processes(replace(MACHINE, run_dir=Path("/" + "x" * 150)))
    socket = found["agent-0"].socket
    assert socket is not None
    assert len(f"{socket}{EVENTS_SUFFIX}") <= SOCKET_PATH_LIMIT
    assert str(socket) in flag(found["engine-0"], "--kv-transfer-config")


def test_no_token_reaches_a_program_and_the_plan_is_stable() -> None:
    sections = {"engine": {"replicas": 2}, "cache": {"disk": {"size": "1Gi"}}}
    first, second = processes(**sections), processes(**sections)
    assert first == second
    texts = [t for p in first.values() for t in (*p.argv, *p.env.values(), *p.files.values())]
    assert not [text for text in texts if TOKEN.search(text)]


def test_the_crd_in_the_tree_is_the_one_of_the_spec() -> None:
    assert (ROOT / "crds" / "cachecluster.yaml").read_text() == render_crd(), (
        "run: python -m kvist_operator.crd > crds/cachecluster.yaml"
    )


def test_every_field_of_the_crd_is_described() -> None:
    def missing(node: dict[str, Any], path: str) -> list[str]:
        found = [] if "description" in node or path.rpartition(".")[2] in ("metadata", "status") else [path]
        for name, item in node.get("properties", {}).items():
            found += missing(item, f"{path}.{name}")
        return found + (missing(node["items"], f"{path}[]") if "properties" in node.get("items", {}) else [])

    crd = yaml.safe_load(render_crd())
    assert missing(crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"], "") == []


def test_spec_plan_and_local_rendering_need_no_kubernetes() -> None:
    code = (
        "import sys, kvist_operator.spec.checks, kvist_operator.plan, kvist_operator.render.local;"
        "print([m for m in ('kopf', 'kubernetes', 'torch', 'vllm') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ast.literal_eval(done.stdout) == []
