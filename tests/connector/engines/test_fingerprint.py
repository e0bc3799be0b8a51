"""The fingerprint: every ingredient changes it, nothing else does, and no process differs."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvist_connector.engines.vllm.config import EngineConfig, ExtraConfig
from kvist_connector.engines.vllm.fingerprint import describe_engine, fingerprint, weights_identity
from kvist_connector.errors import UnsupportedError

texts = st.text(max_size=6)


def write_weights(folder, name="model.safetensors", header=b'{"w":{}}', body=b"\0" * 8):
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(struct.pack("<Q", len(header)) + header + body)
    return folder


@pytest.fixture
def model(tmp_path):
    return write_weights(tmp_path / "model")


def engine(model, **changed):
    """Everything that the fingerprint is made of, one of it changed."""
    given = {
        "hf": {"hidden_size": 64, "rope": {"theta": 1.0}, "_name_or_path": str(model)},
        "dtype": torch.bfloat16,
        "quantization": None,
        "cache_dtype": "auto",
        "scales": False,
        "tp": 1,
        "pp": 1,
        "revision": "",
        "block": 32,
        "chunk": 256,
        "layout": "3 layers of 8 pages of 512 bytes",
        "backends": "vllm 0.32.0; CPU_ATTN[amx]",
        **changed,
    }
    vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(
            hf_config=SimpleNamespace(to_dict=lambda: given["hf"]),
            model=str(model),
            dtype=given["dtype"],
            quantization=given["quantization"],
        ),
        cache_config=SimpleNamespace(cache_dtype=given["cache_dtype"], calculate_kv_scales=given["scales"]),
        parallel_config=SimpleNamespace(tensor_parallel_size=given["tp"], pipeline_parallel_size=given["pp"]),
        load_config=SimpleNamespace(load_format="auto"),
    )
    config = EngineConfig(
        extra=ExtraConfig(revision=given["revision"]),
        engine="e",
        model=str(model),
        block_tokens=given["block"],
        chunk_tokens=given["chunk"],
        num_blocks=100,
        ranks=1,
        overlapping_steps=False,
    )
    return fingerprint(describe_engine(vllm_config, config, given["layout"], given["backends"]))


CHANGES = [
    {"hf": {"hidden_size": 65, "rope": {"theta": 1.0}}},
    {"hf": {"hidden_size": 64, "rope": {"theta": 2.0}}},  # an override deep inside
    {"dtype": torch.float16},
    {"quantization": "fp8"},
    {"cache_dtype": "fp8"},
    {"scales": True},
    {"tp": 2},
    {"pp": 2},
    {"revision": "b"},
    {"block": 64},
    {"chunk": 512},
    {"layout": "3 layers of 8 pages of 256+256 bytes"},
    {"backends": "vllm 0.33.0; CPU_ATTN[amx]"},
    {"backends": "vllm 0.32.0; CPU_ATTN[vec]"},
]


@pytest.mark.parametrize("changed", CHANGES, ids=str)
def test_every_ingredient_changes_it(model, changed):
    assert engine(model, **changed) != engine(model)


def test_all_changes_differ_from_each_other(model):
    assert len({engine(model, **changed) for changed in CHANGES}) == len(CHANGES)


def test_the_place_of_the_model_does_not(tmp_path, model):
    copy = write_weights(tmp_path / "copy")
    assert engine(copy) == engine(model)
    (copy / "README.md").write_text("not a weight")
    assert engine(copy) == engine(model)


@pytest.mark.parametrize(
    "other",
    [{"header": b'{"v":{}}'}, {"body": b"\0" * 9}, {"name": "other.safetensors"}],
    ids=["header", "size", "name"],
)
def test_other_weights_have_another_identity(tmp_path, model, other):
    changed = write_weights(tmp_path / "changed", **other)
    assert weights_identity(str(changed), "auto") != weights_identity(str(model), "auto")


def test_a_hub_snapshot_is_told_by_its_commit(tmp_path):
    folder = tmp_path / "snapshots" / "0123abcd"
    folder.parent.mkdir()
    assert weights_identity(str(write_weights(folder)), "auto") == "commit:0123abcd"


def test_a_folder_without_weights_is_refused_with_the_remedy(tmp_path):
    with pytest.raises(UnsupportedError, match=r"set kv_connector_extra_config\.revision"):
        weights_identity(str(tmp_path), "auto")


def test_processes_with_other_hash_seeds_agree():
    parts = {"b": "2", "a": "1", "model": "é"}
    code = (
        "import json,sys; from kvist_connector.engines.vllm.fingerprint import fingerprint;"
        "print(fingerprint(json.loads(sys.argv[1])).hex())"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code, json.dumps(parts)],
            env={"PYTHONHASHSEED": seed, "PATH": ""},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert found == {fingerprint(parts).hex()}


@settings(deadline=None)
@given(st.dictionaries(texts, texts, max_size=4), st.dictionaries(texts, texts, max_size=4))
def test_equal_only_for_equal_parts(one, other):
    assert (fingerprint(one) == fingerprint(other)) == (one == other)
