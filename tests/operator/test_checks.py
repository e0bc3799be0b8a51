"""What needs two fields, the model or the machine: the first violation, with field, value and remedy."""

from __future__ import annotations

from typing import Any

import pytest

from kvist_operator.spec.checks import Facts, first_violation
from kvist_operator.spec.model_facts import ModelFacts, model_facts
from kvist_operator.testing import cluster

SMOLLM2 = {
    "dtype": "bfloat16",
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 8192,
}
GIB = 1024**3
MACHINE = Facts(
    memory_total=16 * GIB,
    memory_free=12 * GIB,
    arena_free=8 * GIB,
    disk_free=20 * GIB,
    devices=0,
    model=model_facts(SMOLLM2),
    cpu=True,
)


def test_what_fits_has_no_violation() -> None:
    wanted = cluster(
        engine={"replicas": 2, "kvCacheMemory": "512Mi"}, cache={"memory": "1Gi", "disk": {"size": "4Gi"}}
    )
    assert first_violation(wanted, MACHINE) is None


def test_an_index_without_memory_tier_is_valid() -> None:
    assert first_violation(cluster(cache={"memory": 0}), MACHINE) is None


@pytest.mark.parametrize(
    ("engine", "cache", "field", "value", "remedy"),
    [
        ({}, {"memory": "5Mi"}, "spec.cache.memory", "5Mi", "at least 6Mi"),
        ({}, {"disk": {"size": "1Mi"}}, "spec.cache.disk.size", "1Mi", "at least 6Mi"),
        ({"replicas": 2}, {"memory": "5Gi"}, "spec.cache.memory", "5Gi", "at most 4Gi"),
        ({"replicas": 3}, {"disk": {"size": "10Gi"}}, "spec.cache.disk.size", "10Gi", "at most"),
        ({"kvCacheMemory": "64Mi"}, {}, "spec.engine.kvCacheMemory", "64Mi", "maxModelLen to at most 2912"),
        ({"kvCacheMemory": "13Gi"}, {}, "spec.engine.kvCacheMemory", "13Gi", "set less"),
        ({"maxModelLen": 9000}, {}, "spec.engine.maxModelLen", "9000", "at most 8192"),
        ({"blockSize": 48}, {}, "spec.engine.blockSize", "48", "set 32"),
        ({"blockSize": 96}, {}, "spec.engine.blockSize", "96", "divisor of 256"),
        ({}, {"chunkTokens": 512}, "spec.cache.chunkTokens", "512", "256"),
        ({"device": "cuda"}, {}, "spec.engine.replicas", "1", "engine.device: cpu"),
    ],
)
def test_what_cannot_be_is_said_with_field_value_and_remedy(
    engine: dict[str, Any], cache: dict[str, Any], field: str, value: str, remedy: str
) -> None:
    found = first_violation(cluster(engine=engine, cache=cache), MACHINE)
    assert found is not None
    assert (found.field, found.value) == (field, value)
    assert remedy in str(found)


def test_what_is_not_known_is_not_checked() -> None:
    assert first_violation(cluster(engine={"replicas": 100}, cache={"memory": "900Gi"}), Facts()) is None


def test_a_cache_that_is_off_needs_no_room() -> None:
    assert first_violation(cluster(cache={"enabled": False, "memory": "900Gi"}), MACHINE) is None


@pytest.mark.parametrize(
    ("config", "dtype", "expected"),
    [
        (SMOLLM2, "auto", ModelFacts(23_040, 8192)),
        (SMOLLM2, "float32", ModelFacts(46_080, 8192)),
        ({"text_config": SMOLLM2}, "auto", ModelFacts(23_040, 8192)),
        ({**SMOLLM2, "kv_lora_rank": 512, "qk_rope_head_dim": 64}, "auto", ModelFacts(30 * 576 * 2, 8192)),
        ({**SMOLLM2, "layer_types": ["linear", "full"]}, "auto", ModelFacts(None, 8192)),
        ({}, "auto", ModelFacts(None, None)),
    ],
)
def test_kv_size_is_read_from_the_models_config_or_unknown(
    config: dict[str, Any], dtype: str, expected: ModelFacts
) -> None:
    assert model_facts(config, dtype) == expected
