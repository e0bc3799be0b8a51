"""KV of a token: the plain formula, MLA's own, and a reason where neither holds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist_connector.kv_size import KvKind, kv_size
from kvist_connector.planner import PrefillModel, TierPrice, break_even_bandwidth

PLAIN = {
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 32768,
}


def test_a_known_model_takes_48_kib_a_token_and_384_mib_for_8192():
    found = kv_size(PLAIN)
    assert found.kind is KvKind.ATTENTION
    assert found.bytes_per_token == 48 * 1024
    assert found.bytes_per_token * 8192 == 384 * 1024**2
    assert found.formula == "2 x 24 layers x 4 KV heads x 128 x 2 bytes"


def test_latents_have_their_own_formula():
    deepseek = {**PLAIN, "num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    found = kv_size(deepseek)
    assert (found.kind, found.bytes_per_token) == (KvKind.LATENT, 61 * 576 * 2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kv_lora_rank": 512}, "without num_hidden_layers or qk_rope_head_dim"),
        ({"sliding_window": 4096}, "sliding window of 4096 tokens"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "sliding_attention"),
        ({"layer_types": ["linear_attention"]}, "linear_attention"),
        ({"mamba_d_state": 16}, "recurrent layers (mamba_d_state)"),
        ({"torch_dtype": "int3"}, "type of numbers is 'int3'"),
        ({"torch_dtype": None}, "type of numbers is ''"),
        ({"num_hidden_layers": None}, "does not say num_hidden_layers"),
        ({"head_dim": None}, "neither head_dim nor hidden_size"),
    ],
)
def test_what_is_different_is_said_and_not_computed(change, words):
    found = kv_size({**PLAIN, **change})
    assert (found.kind, found.bytes_per_token) == (KvKind.OTHER, None)
    assert words in found.reason


@pytest.mark.parametrize(
    "change",
    [
        {"layer_types": ["full_attention"] * 24, "sliding_window": 4096},
        {"sliding_window": 4096, "use_sliding_window": False},
        {"sliding_window": 32768},
        {"head_dim": None, "hidden_size": 2048},
    ],
)
def test_windows_that_are_not_used_change_nothing(change):
    assert kv_size({**PLAIN, **change}).bytes_per_token == 48 * 1024


def test_the_cache_may_have_another_type_than_the_model():
    assert kv_size(PLAIN, "fp8").bytes_per_token == 24 * 1024


@given(
    tokens=st.integers(1, 100_000),
    linear=st.floats(1e-6, 1e-2),
    quadratic=st.floats(0, 1e-8),
    latency=st.floats(0, 0.1),
)
def test_at_the_break_even_bandwidth_loading_takes_as_long_as_computing(tokens, linear, quadratic, latency):
    prefill, size = PrefillModel(linear, quadratic), tokens * 1024
    found = break_even_bandwidth(prefill, tokens, size, latency)
    computed = prefill.seconds(0, tokens)
    if found is None:
        assert computed <= latency
    else:
        assert TierPrice(latency, found).seconds(size) == pytest.approx(computed)
