"""`KvistConnector`: the class named in `--kv-transfer-config`.

    {"kv_connector": "KvistConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
     "kv_connector_module_path": "kvist_connector.engines.vllm.connector",
     "kv_connector_extra_config": {"agent": "/path/agent.sock"}}

A facade: vLLM builds one per scheduler and one per worker; every hook is handed to the
scheduler half or the worker half, which hold all behaviour.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import CUDAGraphMode
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvist_connector.engines.agent_client import AgentClient
from kvist_connector.engines.inbox import AgentLink, Inbox
from kvist_connector.engines.spawn import Reviver, SpawnSettings, ensure_agent
from kvist_connector.engines.vllm.backends import describe_backends
from kvist_connector.engines.vllm.config import EngineConfig, own_folder, read_config
from kvist_connector.engines.vllm.fingerprint import GROUP, describe_engine, fingerprint
from kvist_connector.engines.vllm.layout import describe, layer_index, read_pages, read_values
from kvist_connector.engines.vllm.logs import speak_through_vllm
from kvist_connector.engines.vllm.metadata import StepPlan
from kvist_connector.engines.vllm.scheduler import SchedulerHalf
from kvist_connector.engines.vllm.worker import WorkerHalf
from kvist_connector.errors import UnsupportedError
from kvist_connector.protocol.engine import NO_VALUES, PROTOCOL_VERSION, Hello, Layout, Values
from kvist_connector.transfer.base import PageCopier
from kvist_connector.transfer.pages import PageTable

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class KvistConnector(KVConnectorBase_V1, SupportsHMA):
    """See the module's docstring."""

    _cache_hit_source = CacheHitSource.HOST

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        speak_through_vllm()
        self._config = read_config(vllm_config, kv_cache_config)
        socket, revive = find_agent(self._config)
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._link = open_link(self._config, socket, revive)
            self._scheduler = SchedulerHalf(self._config, self._link)
        else:
            self._worker = WorkerHalf(
                self._config, int(vllm_config.parallel_config.rank), socket, revive=revive
            )

    @property
    def requires_kv_delivery(self) -> bool:
        """A dropped store is a later miss, nothing worse."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Full graphs are fine: without layer hooks all layers are ordered before the forward pass."""
        return False

    @property
    def scheduler_half(self) -> SchedulerHalf:
        """For whoever runs the engine in its own process."""
        return self._half()

    # ---- scheduler half

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        if self._scheduler is not None:
            self._scheduler.kv_used = gpu_block_pool.get_usage
            self._scheduler.forget_cached = lambda: gpu_block_pool.evict_blocks(
                {block.block_id for block in gpu_block_pool.blocks if block.block_hash is not None}
            )

    def on_new_request(self, request: Request) -> None:
        self._half().new_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._half().matched_tokens(request, num_computed_tokens), False

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self._half().allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self._half().plan_step(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._half().step_done(connector_output)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._half().finished(request)
        return False, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._half().finished(request)
        return False, None

    def has_pending_push_work(self) -> bool:
        return self._half().has_pending_stores()

    def reset_cache(self) -> bool:
        return self._half().reset_cache()

    def take_events(self) -> Iterable[KVCacheEvent]:
        return ()

    # ---- worker half

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        table = read_pages(
            kv_caches, self._config.num_blocks, self._config.block_tokens, self._config.chunk_tokens
        )
        layers = layer_index(kv_caches, table)
        backends = describe_backends(self._vllm_config, list(kv_caches))
        parts = describe_engine(self._vllm_config, self._config, describe(table), backends)
        layout = engine_layout(self._config, table, parts, read_values(kv_caches))
        self._copying().register(make_copier(table), layers, layout)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        self._copying().begin_step()

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        graph = getattr(forward_context, "cudagraph_runtime_mode", CUDAGraphMode.NONE)
        hooks = graph != CUDAGraphMode.FULL and not self._vllm_config.use_v2_model_runner
        self._copying().start_loads(self._plan(), overlap=hooks)

    def wait_for_layer_load(self, layer_name: str) -> None:
        self._copying().wait_layer(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        """Nothing: finished chunks are gathered once per step, in `wait_for_save`."""

    def wait_for_save(self) -> None:
        self._copying().save(self._plan())

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._copying().failed_pages()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self._copying().report(self._plan())

    def shutdown(self) -> None:
        if self._scheduler is not None:
            self._link.close()
        if self._worker is not None:
            self._worker.close()

    # ----

    def _half(self) -> SchedulerHalf:
        if self._scheduler is None:
            raise UnsupportedError("a hook of the scheduler was called on a worker's connector")
        return self._scheduler

    def _copying(self) -> WorkerHalf:
        if self._worker is None:
            raise UnsupportedError("a hook of the worker was called on the scheduler's connector")
        return self._worker

    def _plan(self) -> StepPlan:
        plan = self._get_connector_metadata()
        if not isinstance(plan, StepPlan):
            raise UnsupportedError(f"metadata of another connector: {type(plan).__name__}")
        return plan


def find_agent(config: EngineConfig) -> tuple[Path, Callable[[], None] | None]:
    """Socket of the given agent, or of one spawned for this engine and what replaces it when it dies."""
    extra = config.extra
    if extra.agent is not None:
        return Path(extra.agent), None
    settings = SpawnSettings(own_folder(config), extra.memory, extra.disk, extra.disk_size)
    return ensure_agent(settings), Reviver(settings)


def open_link(config: EngineConfig, socket: Path, revive: Callable[[], None] | None = None) -> AgentLink:
    """The scheduler half's connection."""
    hello = Hello(
        protocol=PROTOCOL_VERSION,
        role="scheduler",
        engine=config.engine,
        member=f"scheduler-{os.getpid()}-{uuid.uuid4().hex[:8]}",
        rank=0,
        pid=os.getpid(),
    )
    inbox = Inbox()
    client = AgentClient(socket, lambda: (hello,), inbox, "scheduler", revive=revive)
    client.start()
    return AgentLink(client, inbox)


def engine_layout(
    config: EngineConfig, table: PageTable, parts: dict[str, str], values: Values = NO_VALUES
) -> Layout:
    """What the agent needs of this rank."""
    return Layout(
        fingerprint=fingerprint(parts),
        group=GROUP,
        ranks=config.ranks,
        layers=len(table.layers),
        layer_bytes=table.layer_bytes,
        blocks=table.blocks,
        chunk_tokens=config.chunk_tokens,
        block_tokens=config.block_tokens,
        model=config.model,
        description=parts,
        values=values,
    )


def make_copier(table: PageTable) -> PageCopier:
    """The copier for the device the pages are on."""
    if table.device.type == "cpu":
        from kvist_connector.transfer.cpu import CpuCopier

        return CpuCopier(table)
    if table.device.type == "cuda":
        from kvist_connector.transfer.cuda import CudaCopier

        return CudaCopier(table)
    raise UnsupportedError(f"KV pages on device {table.device}: only cpu and cuda are supported")
