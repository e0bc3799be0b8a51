"""Fixtures of the scheduler tests: vLLM's own scheduler over a simulated model (simulator.py).

Copies, arena, socket and agent protocol are the real ones.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvist_connector.testing.fake_agent import FakeAgent

os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Before torch is loaded: threads that spin at every barrier make engines crawl beside other processes.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
from tests.connector.engines.simulated_model import LAYERS, VOCABULARY, expected_output, next_token
from tests.connector.engines.simulator_factory import SimulatorFactory


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration without weights: enough for vLLM's scheduler."""
    folder = tmp_path_factory.mktemp("tiny-model")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_hidden_layers": LAYERS,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 8192,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def fake_agent(tmp_path: Path) -> Iterator[FakeAgent]:
    agent = FakeAgent(tmp_path).start()
    yield agent
    agent.close()


@pytest.fixture
def engine(tiny_model: Path, fake_agent: FakeAgent) -> Iterator[SimulatorFactory]:
    factory = SimulatorFactory(tiny_model, fake_agent)
    yield factory
    for simulator in factory.made:
        simulator.close()


@pytest.fixture
def oracle() -> Callable[[list[int], int], list[int]]:
    """The model's answer without any cache."""
    return expected_output


@pytest.fixture
def draft() -> Callable[[int], Callable[[list[int]], list[int]]]:
    """`draft(n)`: proposes three tokens, of which the first n are right."""

    def with_right(right: int) -> Callable[[list[int]], list[int]]:
        def propose(tokens: list[int]) -> list[int]:
            proposed: list[int] = []
            for index in range(3):
                token = next_token(tokens + proposed)
                proposed.append(token if index < right else (token + 1) % VOCABULARY)
            return proposed

        return propose

    return with_right
