"""The manifest: what is accepted, and what a user reads about the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist_connector.errors import ConfigError
from kvist_connector.quantity import format_quantity, parse_quantity
from kvist_operator import spec
from kvist_operator.spec.base import format_duration, parse_duration
from kvist_operator.spec.local_use import ignored_locally

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))


def manifest(**sections: Any) -> dict[str, Any]:
    return {
        "apiVersion": "kvist.dev/v1alpha1",
        "kind": "CacheCluster",
        "metadata": {"name": "test"},
        "spec": {"model": {"name": "demo/SmolLM2-135M-Instruct"}, **sections},
    }


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_every_example_is_valid_and_survives_being_written_and_read(path: Path) -> None:
    cluster = spec.load(path)
    assert spec.loads(spec.dump(cluster)) == cluster
    assert spec.loads(spec.dump(cluster, defaults=True)) == cluster


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 5000, "nested too deeply"),
        ("a: " + "9" * 5000, "not YAML: Exceeds the limit"),
        ("a: 2020-99-99", "not YAML: month must be"),
        ("kind: a\nkind: b", "key 'kind' is given twice"),
    ],
)
def test_text_that_is_no_manifest_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=r"^manifest: ") as caught:
        spec.loads(text)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"cache": {"memory": "9" * 5000 + "Gi"}}, "spec.cache.memory"),
        ({"cache": {"memory": "\uff11Gi"}}, "a size is a number"),
        ({"cache": {"memory": "9000Pi"}}, "a size is less than 8192Pi"),
        ({"cache": {"disk": {"size": "1Gi", "path": "a\0b"}}}, "spec.cache.disk.path"),
        ({"engine": {"extraArgs": ["a\0"]}}, "spec.engine.extraArgs.0"),
        ({"engine": {"env": [{"name": "A", "value": "\0"}]}}, "spec.engine.env.0.value"),
        (
            {"engine": {"extraArgs": "--foo"}},
            "'--foo' is not valid: a list is expected",
        ),
        ({"engine": 5}, "spec.engine: 5 is not valid: a mapping is expected"),
        ({"engine": {"startupDeadline": float("inf")}}, "a duration is at most 3650d"),
        ({"router": {"limits": {"firstByteDeadline": "9" * 20 + "d"}}}, "a duration is at most 3650d"),
        ({"router": {"weights": {"bound": float("nan")}}}, "spec.router.weights.bound"),
    ],
)
def test_values_that_no_machine_can_take_are_named(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        spec.parse(manifest(**sections))
    assert message in str(caught.value)
    assert len(str(caught.value)) < 400


def test_defaults_are_complete() -> None:
    cluster = spec.parse(manifest())
    assert cluster.spec.cache.memory == 1024**3
    assert cluster.spec.cache.enabled
    assert cluster.spec.engine.replicas == 1
    assert cluster.spec.router.policy == "kvist"


@pytest.mark.parametrize(
    ("sections", "field", "value", "remedy"),
    [
        ({"engine": {"replcas": 2}}, "spec.engine.replcas", "", "did you mean 'replicas'?"),
        ({"engine": {"kv_cache_memory": "1Gi"}}, "spec.engine.kv_cache_memory", "", "'kvCacheMemory'"),
        ({"cahce": {}}, "spec.cahce", "", "did you mean 'cache'?"),
        ({"engine": {"replicas": "two"}}, "spec.engine.replicas", "'two'", "valid integer"),
        ({"engine": {"replicas": "2"}}, "spec.engine.replicas", "'2'", "valid integer"),
        ({"cache": {"enabled": 1}}, "spec.cache.enabled", "1", "valid boolean"),
        ({"engine": {"extraArgs": ["--max-num-seqs", 8]}}, "spec.engine.extraArgs.1", "8", "valid string"),
        ({"engine": {"replicas": -1}}, "spec.engine.replicas", "-1", "greater than or equal to 0"),
        ({"cache": {"memory": "1Gigabyte"}}, "spec.cache.memory", "'1Gigabyte'", "Mi, Gi"),
        ({"cache": {"memory": -5}}, "spec.cache.memory", "-5", "not negative"),
        ({"cache": {"disk": {"size": 0}}}, "spec.cache.disk.size", "0", "greater than 0"),
        ({"cache": {"disk": {}}}, "spec.cache.disk.size", "", "required"),
        ({"cache": {"enabled": "perhaps"}}, "spec.cache.enabled", "'perhaps'", "valid boolean"),
        ({"cache": {"eviction": "fifo"}}, "spec.cache.eviction", "'fifo'", "'cost' or 'lru'"),
        ({"cache": {"ttl": "soon"}}, "spec.cache.ttl", "'soon'", "such as 30s"),
        (
            {"cache": {"remote": {"redis": {}}}},
            "spec.cache.remote.redis",
            "",
            "exactly one of managed and urls",
        ),
        ({"router": {"policy": "roundrobin"}}, "spec.router.policy", "'roundrobin'", "'round-robin'"),
        ({"model": {}}, "spec.model.name", "", "required"),
        ({"engine": {"extraArgs": ["--port=1"]}}, "spec.engine", "--port=1", "kvist up"),
        ({"engine": {"extraArgs": ["--kv_transfer_config", "{}"]}}, "spec.engine", "--kv_transfer", "cache"),
        ({"engine": {"extraArgs": ["--kv-transfer-config.kv_role=x"]}}, "spec.engine", "kv_role", "cache"),
        ({"engine": {"extraArgs": ["--kv_tr", "{}"]}}, "spec.engine", "--kv_tr", "section cache"),
        ({"engine": {"extraArgs": ["--rev", "x"]}}, "spec.engine", "--rev", "model.revision"),
        ({"engine": {"extraArgs": ["--config", "f"]}}, "spec.engine", "--config", "extraArgs itself"),
        ({"engine": {"env": [{"name": "1A", "value": "x"}]}}, "spec.engine.env.0.name", "'1A'", "pattern"),
    ],
)
def test_a_wrong_field_is_named_with_its_value_and_what_is_valid(
    sections: dict[str, Any], field: str, value: str, remedy: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        spec.parse(manifest(**sections))
    text = str(refused.value)
    assert text.startswith(f"{field}: ")
    assert value in text
    assert remedy in text


def test_all_wrong_fields_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as refused:
        spec.parse(manifest(engine={"replicas": "x"}, cache={"memory": "y"}))
    assert len(str(refused.value).splitlines()) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "not YAML"),
        ("", "0 YAML documents"),
        ("a: 1\n---\nb: 2\n", "2 YAML documents"),
        ("- a", "a manifest is a mapping"),
        ("apiVersion: v1\nkind: Pod\nmetadata: {name: x}\nspec: {model: {name: m}}", "kvist.dev/v1alpha1"),
    ],
)
def test_text_that_is_no_manifest_is_refused_in_words(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        spec.loads(text)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nope\.yaml: cannot be read: No such file"):
        spec.load(tmp_path / "nope.yaml")


def test_settings_for_kubernetes_only_are_named_for_one_machine() -> None:
    cluster = spec.parse(
        manifest(
            engine={"image": "x", "replicas": 2},
            cache={
                "disk": {"size": 1, "volumeClaimTemplate": {"a": 1}},
                "remote": {"redis": {"managed": {}}, "objectStore": {"url": "s3://bucket"}},
                "ttl": "7d",
            },
            security={},
        )
    )
    assert ignored_locally(cluster) == (
        "spec.engine.image",
        "spec.cache.disk.volumeClaimTemplate",
        "spec.cache.remote.redis.managed",
        "spec.security",
    )
    assert ignored_locally(spec.parse(manifest())) == ()


@given(st.integers(min_value=0, max_value=2**60))
def test_quantities_are_written_as_they_are_read(size: int) -> None:
    assert parse_quantity(format_quantity(size)) == size


@given(st.integers(min_value=0, max_value=10**9))
def test_durations_are_written_as_they_are_read(milliseconds: int) -> None:
    seconds = milliseconds / 1000
    assert parse_duration(format_duration(seconds)) == pytest.approx(seconds)
