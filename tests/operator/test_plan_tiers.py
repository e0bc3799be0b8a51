"""Shared tiers in the plan: the agent's flags, and its secrets as files, on one machine."""

from dataclasses import replace
from pathlib import Path

import pytest

from kvist_connector.agent.settings import AgentSettings
from kvist_connector.settings import field_names
from kvist_operator.plan import TOKEN, cpu_target, make_plan
from kvist_operator.plan.tiers import external_secrets
from kvist_operator.render.local import Machine, render
from kvist_operator.testing import cluster

MACHINE = Machine(
    run_dir=Path("/run/kvist/test"),
    arena_dir=Path("/dev/shm"),
    host="127.0.0.1",
    ports={"router": 8080, "router-admin": 8081, "engine": 8100, "agent": 8200},
    python="python3",
    model="/models/m",
)
REDIS = {
    "urls": ["rediss://one:6379/0", "redis://user@two:6379/0"],
    "password": {"name": "redis", "key": "password"},
    "ca": {"name": "redis", "key": "ca.crt"},
}
STORE = {
    "url": "s3://bucket/prefix",
    "endpoint": "https://s3.example.com",
    "region": "eu-north-1",
    "credentials": {"name": "s3"},
}
BOTH = {"remote": {"redis": REDIS, "objectStore": STORE}, "ttl": "2h"}


def agent(given):
    found = external_secrets(given)
    files = {token: f"/secrets/{each.ref.name}/{each.ref.key}" for token, each in found.items()}
    plan = make_plan(given, cpu_target(4, offline=True))
    return render(plan, replace(MACHINE, secrets=files))[0]


def flags(process):
    given = process.argv[3:]
    return dict(zip(given[::2], given[1::2], strict=True))


def test_external_tiers_are_flags_and_their_secrets_files():
    found = flags(agent(cluster(cache=BOTH)))
    assert {name: value for name, value in found.items() if name.startswith(("--redis", "--object"))} == {
        "--redis.urls": "rediss://one:6379/0,redis://user@two:6379/0",
        "--redis.password-file": "/secrets/redis/password",
        "--redis.ca-file": "/secrets/redis/ca.crt",
        "--redis.ttl": "7200",
        "--object-store.url": "s3://bucket/prefix",
        "--object-store.endpoint": "https://s3.example.com",
        "--object-store.region": "eu-north-1",
        "--object-store.credentials-file": "/secrets/s3/token",
    }
    argv = agent(cluster(cache={"remote": {"redis": REDIS}})).argv
    assert not any(TOKEN.search(argument) for argument in argv)


def test_every_flag_is_one_that_the_agent_has():
    known = {"--" + name.replace("_", "-") for name, _ in field_names(AgentSettings)}
    assert set(flags(agent(cluster(cache=BOTH)))) <= known


@pytest.mark.parametrize("remote", [{}, {"redis": {"managed": {}}}])
def test_one_machine_runs_no_managed_redis(remote):
    assert not any(name.startswith("--redis") for name in flags(agent(cluster(cache={"remote": remote}))))
