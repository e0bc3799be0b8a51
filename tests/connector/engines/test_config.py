"""What an engine is refused for, in words, before it serves anything."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
from tests.connector.engines.simulator_factory import kv_cache_config, transfer_config
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MambaSpec

from kvist_connector.engines.vllm.config import own_folder, read_config
from kvist_connector.errors import ConfigError, UnsupportedError


@pytest.fixture
def engine_config(engine):
    """`engine_config(extra, **transfer)`: vLLM's own configuration."""
    made = engine.config()

    def build(extra=None, **options):
        made.kv_transfer_config = transfer_config(extra or {}, **options)
        return made

    return build


def test_facts_of_a_good_configuration(engine_config):
    facts = read_config(engine_config({"agent": "/run/agent.sock"}), kv_cache_config(100))
    assert (facts.block_tokens, facts.chunk_tokens, facts.blocks_per_chunk, facts.num_blocks) == (
        32,
        256,
        8,
        100,
    )
    assert facts.ranks == 1
    assert not facts.overlapping_steps


@pytest.mark.parametrize("asynchronous", [False, True])
def test_overlap_follows_async_scheduling(engine_config, asynchronous):
    config = engine_config()
    config.scheduler_config.async_scheduling = asynchronous
    assert read_config(config, kv_cache_config(100)).overlapping_steps is asynchronous


def test_a_policy_that_would_fail_requests_is_refused_with_the_remedy(engine_config):
    with pytest.raises(ConfigError, match='"kv_load_failure_policy": "recompute"') as caught:
        read_config(engine_config(kv_load_failure_policy="fail"), kv_cache_config(100))
    assert "'fail'" in str(caught.value)


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_a_role_that_is_not_served_is_refused(engine_config, role):
    with pytest.raises(ConfigError, match=f"kv_role: '{role}'.*use 'kv_both'"):
        read_config(engine_config(kv_role=role), kv_cache_config(100))


@pytest.mark.parametrize("block_tokens", [24, 48, 96, 512])
def test_blocks_that_do_not_divide_a_chunk_are_refused(engine_config, block_tokens):
    with pytest.raises(ConfigError, match=f"--block-size {block_tokens}: does not divide the chunk of 256"):
        read_config(engine_config(), kv_cache_config(100, block_tokens))


@pytest.mark.parametrize(
    ("given", "nearest"), [("agnet", "agent"), ("disk-size", "disk_size"), ("memroy", "memory")]
)
def test_an_unknown_name_is_refused_with_the_nearest(engine_config, given, nearest):
    with pytest.raises(ConfigError, match=f"{given}.*{nearest}"):
        read_config(engine_config({given: "x"}), kv_cache_config(100))


def test_a_wrong_type_is_refused_with_its_name(engine_config):
    with pytest.raises(ConfigError, match=r"kv_connector_extra_config.*memory"):
        read_config(engine_config({"memory": ["1Gi"]}), kv_cache_config(100))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"memory": "1Gx"}, r"\.memory: '1Gx' is not valid: .* such as 512Mi"),
        ({"memory": "-1Gi"}, r"\.memory: '-1Gi' is not valid"),
        ({"disk": "/d", "disk_size": "0"}, r"\.disk_size: '0' is not valid"),
        ({"disk_size": "4Gi"}, r"\.disk_size: .* give kv_connector_extra_config\.disk too"),
        ({"disk": ""}, r"\.disk: '' is not valid"),
        ({"folder": ""}, r"\.folder: '' is not valid"),
        ({"agent": ""}, r"\.agent: '' is not valid"),
    ],
)
def test_what_its_agent_would_not_start_with_is_refused_by_the_engine(engine_config, given, said):
    with pytest.raises(ConfigError, match=said):
        read_config(engine_config(given), kv_cache_config(100))


@pytest.mark.parametrize("memory", ["512Mi", 512 * 1024**2, "536870912"])
def test_sizes_are_numbers_or_quantities(engine_config, memory):
    extra = read_config(engine_config({"memory": memory}), kv_cache_config(100)).extra
    assert extra.memory == 512 * 1024**2


@pytest.mark.parametrize("name", ["memory", "disk", "disk_size", "folder"])
def test_settings_of_a_spawned_agent_beside_a_given_one_are_refused(engine_config, name):
    with pytest.raises(ConfigError, match=f"{name}: belongs to a spawned agent.*remove one of the two"):
        read_config(engine_config({"agent": "/run/agent.sock", name: "1Gi"}), kv_cache_config(100))


def test_more_than_one_kv_group_is_refused(engine_config):
    one = kv_cache_config(100)
    two = KVCacheConfig(100, one.kv_cache_tensors, [*one.kv_cache_groups, *one.kv_cache_groups])
    with pytest.raises(UnsupportedError, match=r"2 KV cache groups \(FullAttentionSpec\)"):
        read_config(engine_config(), two)


def test_a_group_that_is_no_full_attention_is_refused(engine_config):
    one = kv_cache_config(100)
    spec = MambaSpec(block_size=32, shapes=((1,),), dtypes=(one.kv_cache_groups[0].kv_cache_spec.dtype,))
    group = KVCacheGroupSpec(one.kv_cache_groups[0].layer_names, spec)
    with pytest.raises(UnsupportedError, match="kind MambaSpec is not supported"):
        read_config(engine_config(), KVCacheConfig(100, one.kv_cache_tensors, [group]))


def test_context_parallelism_is_refused(engine_config):
    made = engine_config()
    parallel = SimpleNamespace(decode_context_parallel_size=2)
    shown = SimpleNamespace(
        kv_transfer_config=made.kv_transfer_config,
        model_config=made.model_config,
        parallel_config=parallel,
    )
    with pytest.raises(UnsupportedError, match="decode_context_parallel_size 2"):
        read_config(shown, kv_cache_config(100))


def test_own_folders_differ_where_kv_does(engine_config):
    def folder(extra, block_tokens=32):
        return own_folder(read_config(engine_config(extra), kv_cache_config(100, block_tokens)))

    plain = folder({})
    assert plain == folder({"memory": "2Gi"})  # a restarted engine finds its agent
    assert plain.parent.name == f"kvist-{os.getuid()}"
    assert len({plain, folder({"revision": "b"}), folder({}, 64)}) == 3
    assert str(folder({"folder": "/somewhere/else"})) == "/somewhere/else"
