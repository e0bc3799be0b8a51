"""Builds simulators with configurations of vLLM's own classes, as vLLM's scheduler tests do."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tests.connector.engines.simulated_model import BLOCK, CHUNK, LAYERS, TOKEN_BYTES
from tests.connector.engines.simulator import Simulator
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
)
from vllm.v1.structured_output import StructuredOutputManager

from kvist_connector.engines.vllm.config import read_config
from kvist_connector.engines.vllm.connector import KvistConnector, engine_layout, make_copier
from kvist_connector.engines.vllm.layout import layer_index, read_pages
from kvist_connector.engines.vllm.worker import WorkerHalf
from kvist_connector.testing.fake_agent import FakeAgent

NAMES = [f"layer.{index}" for index in range(LAYERS)]


def transfer_config(extra: dict[str, Any], **options: Any) -> KVTransferConfig:
    """What `--kv-transfer-config` becomes."""
    wanted = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute", **options}
    return KVTransferConfig(
        kv_connector="KvistConnector",
        kv_connector_module_path=KvistConnector.__module__,
        kv_connector_extra_config=extra,
        **wanted,
    )


def kv_cache_config(blocks: int, block_tokens: int = BLOCK) -> KVCacheConfig:
    """One group of full attention, all layers in one storage."""
    spec = FullAttentionSpec(
        block_size=block_tokens, num_kv_heads=1, head_size=TOKEN_BYTES // 2, dtype=torch.uint8
    )
    page = block_tokens * TOKEN_BYTES
    tensor = KVCacheTensor(
        size=page * blocks * LAYERS, layers=NAMES, layer_stride=page * blocks, block_stride=page
    )
    return KVCacheConfig(
        num_blocks=blocks, kv_cache_tensors=[tensor], kv_cache_groups=[KVCacheGroupSpec(NAMES, spec)]
    )


@dataclass
class SimulatorFactory:
    """Builds simulators against a fake agent, all closed at the end of the test."""

    model: Path
    agent: FakeAgent
    made: list[Simulator] = field(default_factory=list)

    def config(self, asynchronous: bool = False, spec_tokens: int = 0, **options: Any) -> VllmConfig:
        model = ModelConfig(
            model=str(self.model), skip_tokenizer_init=True, dtype="bfloat16", seed=0, max_model_len=8192
        )
        scheduler = SchedulerConfig(
            max_num_seqs=options.get("max_num_seqs", 8),
            max_num_batched_tokens=options.get("budget", 512),
            max_model_len=8192,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=False,
        )
        speculative = None
        if spec_tokens:
            speculative = SpeculativeConfig(
                method="ngram",
                num_speculative_tokens=spec_tokens,
                prompt_lookup_max=3,
                target_model_config=model,
                target_parallel_config=ParallelConfig(),
            )
        return VllmConfig(
            model_config=model,
            scheduler_config=scheduler,
            cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True),
            kv_transfer_config=transfer_config(
                {"agent": str(self.agent.socket_path), **options.get("extra", {})}
            ),
            device_config=DeviceConfig("cpu"),
            speculative_config=speculative,
        )

    def __call__(
        self, *, blocks: int = 600, asynchronous: bool = False, ready: bool = True, **options: Any
    ) -> Simulator:
        config = self.config(asynchronous, **options)
        cache = kv_cache_config(blocks)
        config.cache_config.num_gpu_blocks = blocks
        config.scheduler_config.async_scheduling = asynchronous  # vLLM switches it off on CPUs
        init_none_hash(sha256)
        facts = read_config(config, cache)
        caches = [{name: torch.zeros(blocks, BLOCK, TOKEN_BYTES, dtype=torch.uint8) for name in NAMES}]
        table = read_pages(caches[0], blocks, BLOCK, CHUNK)
        worker = WorkerHalf(facts, 0, self.agent.socket_path)
        worker.register(
            make_copier(table), layer_index(caches[0], table), engine_layout(facts, table, {"model": "tiny"})
        )
        kind = AsyncScheduler if asynchronous else Scheduler
        scheduler = kind(
            vllm_config=config,
            kv_cache_config=cache,
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
            hash_block_size=BLOCK,
            log_stats=True,
        )
        simulator = Simulator(scheduler, [worker], caches, overlap=int(asynchronous))
        self.made.append(simulator)
        if ready:
            self.wait_ready(simulator)
        return simulator

    def wait_ready(self, simulator: Simulator) -> None:
        """Both halves connected, arena mapped, slots granted."""
        pause = threading.Event()
        for _ in range(2000):
            simulator.half.poll()
            if simulator.half.ready and all(worker.ready for worker in simulator.workers):
                return
            pause.wait(0.005)
        raise AssertionError("the engine did not find its agent")
