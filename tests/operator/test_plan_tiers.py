"""Shared tiers in the plan: the agent's flags, and its secrets as files, on one machine."""

import argparse
from dataclasses import replace
from pathlib import Path

import pytest

from kvist_connector.agent.settings import AgentSettings
from kvist_connector.errors import ConfigError
from kvist_connector.settings import add_flags, field_names, load
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


def tiers(**cache):
    found = flags(agent(cluster(cache=cache)))
    return {name: value for name, value in found.items() if name.split(".")[0] in ("--redis", "--encryption")}


def test_members_of_a_cluster_and_sentinels_are_told_apart_from_servers():
    urls = ["redis://one:6379", "redis://two:6379"]
    assert tiers(remote={"redis": {"urls": urls, "cluster": True}}) == {
        "--redis.urls": ",".join(urls),
        "--redis.cluster": "true",
    }
    sentinel = {"primary": "chunks", "password": {"name": "sentinels", "key": "password"}}
    assert tiers(remote={"redis": {"urls": urls, "sentinel": sentinel}}) == {
        "--redis.urls": ",".join(urls),
        "--redis.sentinel": "chunks",
        "--redis.sentinel-password-file": "/secrets/sentinels/password",
    }


@pytest.mark.parametrize(
    ("redis", "words"),
    [
        ({"urls": ["redis://a", "rediss://b"], "cluster": True}, "may differ in host and port only"),
        ({"urls": ["redis://a/1"], "cluster": True}, "database 0 only"),
        ({"urls": ["redis://a/1", "redis://b/2"], "sentinel": {"primary": "p"}}, "in host and port only"),
    ],
)
def test_addresses_that_are_not_of_one_group_are_refused(redis, words):
    with pytest.raises(ConfigError, match=words):
        cluster(cache={"remote": {"redis": redis}})


@pytest.mark.parametrize("codec", ["auto", "zstd", "fp8"])
def test_the_codec_is_told_to_every_tier_that_there_is(codec):
    found = flags(agent(cluster(cache=BOTH | {"compression": {"codec": codec}})))
    told = {name: value for name, value in found.items() if name.endswith(".compression")}
    assert told == {"--redis.compression": codec, "--object-store.compression": codec}
    found = flags(agent(cluster(cache={"disk": {"size": "1Gi"}, "compression": {"codec": codec}})))
    assert found["--disk.compression"] == codec
    managed = {"remote": {"redis": {"managed": {}}}, "compression": {"codec": codec}}
    assert not any(name.endswith(".compression") for name in flags(agent(cluster(cache=managed))))


def test_a_tier_may_have_a_codec_of_its_own():
    codecs = {"codec": "zstd", "redis": "none", "objectStore": "fp8"}
    found = flags(agent(cluster(cache=BOTH | {"disk": {"size": "1Gi"}, "compression": codecs})))
    told = {name: value for name, value in found.items() if name.endswith(".compression")}
    assert told == {"--disk.compression": "zstd", "--object-store.compression": "fp8"}


CALLS = {"lookupDeadline": "200ms", "deadline": "3s", "pause": "1m", "concurrency": 32}


def test_deadlines_reach_the_agent_and_are_its_own_otherwise():
    remote = {"redis": REDIS | CALLS, "objectStore": STORE | CALLS}
    disk = {"size": "1Gi", "deadline": "5s", "direct": True}
    more = {"lookupDeadline": "2s", "placement": "exclusive"}
    argv = agent(cluster(cache={"remote": remote, "disk": disk, **more})).argv[3:]
    parser = argparse.ArgumentParser()
    add_flags(parser, AgentSettings)
    settings = load(AgentSettings, parser.parse_args(argv), {}, "X_")
    assert (settings.lookup_deadline, settings.disk.deadline) == (2, 5)
    assert (settings.placement, settings.disk.direct) == ("exclusive", True)
    for tier in (settings.redis, settings.object_store):
        assert (tier.lookup_deadline, tier.deadline, tier.pause, tier.concurrency) == (0.2, 3, 60, 32)
    found = flags(agent(cluster(cache=BOTH | {"disk": {"size": "1Gi"}})))
    left_out = ("deadline", "pause", "concurrency", "direct", "placement")
    assert not any(part in name for name in found for part in left_out)


def test_without_a_codec_nothing_is_told():
    given = cluster(cache=BOTH | {"disk": {"size": "1Gi"}, "compression": {"codec": "none"}})
    assert not any(name.endswith(".compression") for name in flags(agent(given)))


def test_keys_are_a_file():
    given = cluster(cache={"disk": {"size": "1Gi"}, "encryption": {"keys": {"name": "chunk-keys"}}})
    assert flags(agent(given))["--encryption.keys-file"] == "/secrets/chunk-keys/token"
    (secret,) = external_secrets(given).values()
    assert secret.field == "spec.cache.encryption.keys"


def test_the_agent_takes_what_the_plan_tells_it():
    redis = {"urls": ["redis://one:6379"], "cluster": True}
    cache = BOTH | {"remote": {"redis": redis}, "compression": {"codec": "auto"}}
    parser = argparse.ArgumentParser()
    add_flags(parser, AgentSettings)
    settings = load(AgentSettings, parser.parse_args(agent(cluster(cache=cache)).argv[3:]), {}, "X_")
    assert settings.redis.cluster is True
    assert settings.redis.compression == "auto"


def test_every_flag_is_one_that_the_agent_has():
    known = {"--" + name.replace("_", "-") for name, _ in field_names(AgentSettings)}
    assert set(flags(agent(cluster(cache=BOTH)))) <= known


@pytest.mark.parametrize("remote", [{}, {"redis": {"managed": {}}}])
def test_one_machine_runs_no_managed_redis(remote):
    assert not any(name.startswith("--redis") for name in flags(agent(cluster(cache={"remote": remote}))))
