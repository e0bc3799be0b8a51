"""`kvist size` and `kvist bench eviction`: figures, JSON, and bad input in words."""

import json

import pytest
from typer.testing import CliRunner

from kvist_cli.app import app

CONFIG = {
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "torch_dtype": "bfloat16",
}
MANIFEST = """
apiVersion: kvist.dev/v1alpha1
kind: CacheCluster
metadata: {{name: demo}}
spec:
  model: {{name: {model}}}
  cache: {{memory: 3Gi}}
"""


def run(*arguments):
    return CliRunner().invoke(app, [str(one) for one in arguments])


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def test_size_prints_bytes_tokens_and_break_even(model):
    done = run("size", model / "config.json", "--memory", "3Gi", "--prefill", "10000")
    assert done.exit_code == 0
    assert "48.0 KiB (49152 bytes) a token" in done.output
    assert "65,536" in done.output  # tokens in 3 GiB
    assert "384.0 MiB" in done.output
    assert "468.8 MiB/s" in done.output  # 48 KiB x 10,000 tokens a second


def test_size_of_a_manifest_has_its_tiers_in_json(model, tmp_path):
    (tmp_path / "cluster.yaml").write_text(MANIFEST.format(model=model))
    done = run("size", tmp_path / "cluster.yaml", "--disk", "6Gi", "--prefill", "1000", "--json")
    found = json.loads(done.output)
    assert found["tiers"] == {
        "memory": {"bytes": 3 * 2**30, "tokens": 65536},
        "disk": {"bytes": 6 * 2**30, "tokens": 131072},
    }
    assert found["prompts"][1] == {
        "tokens": 8192,
        "bytes": 384 * 2**20,
        "break_even_bandwidth": pytest.approx(48 * 1024 * 1000),
    }


@pytest.mark.parametrize(
    ("change", "words", "code"),
    [
        ({"sliding_window": 1024}, "sliding window of 1024 tokens", 1),
        ({"kv_lora_rank": 512}, "latent attention", 1),
    ],
)
def test_size_refuses_what_it_would_compute_wrongly(model, change, words, code):
    (model / "config.json").write_text(json.dumps({**CONFIG, **change}))
    done = run("size", model)
    assert done.exit_code == code
    assert words in done.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("size", "nowhere/config.json"), "cannot be read"),
        (("size", ".", "--memory", "lots"), "cannot be read"),
        (("bench", "eviction", "--trace", "none", "--capacity", "1Gi"), "none: No such file"),
        (("bench", "eviction", "--trace", "none", "--capacity", "lots"), "--capacity: 'lots' is not valid"),
        (("bench", "eviction", "--trace", "none", "--capacity", "1Ki"), "holds no block of 23.2 MiB"),
    ],
)
def test_bad_input_is_named(arguments, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = run(*arguments)
    assert done.exit_code == 2
    assert words in done.output


def test_a_manifests_model_that_is_no_folder_leads_to_one(tmp_path):
    (tmp_path / "cluster.yaml").write_text(MANIFEST.format(model="owner/model"))
    done = run("size", tmp_path / "cluster.yaml")
    assert (done.exit_code, "`kvist model path owner/model`" in done.output) == (2, True)


def test_bench_eviction_compares_rules_with_the_optimum(tmp_path):
    prompts = [[0, 1], [0, 2], [0, 3], [0, 1]] * 50
    lines = [json.dumps({"input_length": 1024, "hash_ids": ids}) for ids in prompts]
    (tmp_path / "trace.jsonl").write_text("\n".join(lines))
    given = ("bench", "eviction", "--trace", tmp_path / "trace.jsonl", "--bytes-per-token", "1")
    done = run(*given, "--capacity", "1536", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    rates = {row["policy"]: row["hit_rate"] for row in found["rows"]}
    assert (found["requests"], found["distinct_blocks"]) == (200, 4)
    assert rates["lru"] <= rates["optimum"]
    assert rates["cost"] <= rates["optimum"] < 1
    shown = run(*given, "--capacity", "1536").output
    assert f"{100 * rates['optimum']:.2f} %" in shown
    assert "gap closed" in shown


@pytest.mark.parametrize("command", ["size", "bench eviction"])
def test_help_has_examples(command):
    done = run(*command.split(), "--help")
    assert done.exit_code == 0
    assert "Examples:" in done.output
    assert f"kvist {command}" in done.output
