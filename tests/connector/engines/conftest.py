"""vLLM's own scheduler over a simulated model, for the scheduler half.

The model's KV of a position is a digest of all tokens up to it, and its next token a
function of that digest. Every forward pass checks that all KV it attends to is right, so
a wrong load, a wrong key or a page touched too late is a wrong token or a failed check,
not a matter of luck. Copies, arena, socket and agent protocol are the real ones.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch
from blake3 import blake3
from vllm import SamplingParams
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
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
)
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from kvist_connector.engines.vllm.config import read_config
from kvist_connector.engines.vllm.connector import KvistConnector, engine_layout, make_copier
from kvist_connector.engines.vllm.layout import layer_index, read_pages
from kvist_connector.engines.vllm.worker import WorkerHalf
from kvist_connector.testing.fake_agent import FakeAgent

BLOCK = 32
CHUNK = 256
LAYERS = 3
TOKEN_BYTES = 16
VOCABULARY = 5000


def extend(digests: list[bytes], tokens: list[int]) -> list[bytes]:
    """KV of every position: a digest of all tokens up to it, chained."""
    for token in tokens[len(digests) :]:
        before = digests[-1] if digests else b""
        digests.append(blake3(before + token.to_bytes(4, "little")).digest(TOKEN_BYTES))
    return digests


def says(digest: bytes) -> int:
    """The token after a prefix."""
    return int.from_bytes(digest[:4], "little") % VOCABULARY


def next_token(tokens: list[int]) -> int:
    return says(extend([], tokens)[-1])


def expected_output(prompt: list[int], count: int) -> list[int]:
    """The oracle: the model without any cache."""
    tokens = list(prompt)
    digests = extend([], tokens)
    for _ in range(count):
        tokens.append(says(digests[-1]))
        extend(digests, tokens)
    return tokens[len(prompt) :]


@dataclass
class Step:
    output: SchedulerOutput
    result: ModelRunnerOutput


@dataclass
class Simulator:
    """Scheduler, worker half and model of one engine."""

    scheduler: Scheduler
    workers: list[WorkerHalf]
    caches: list[dict[str, torch.Tensor]]
    overlap: int
    drafts: Callable[[list[int]], list[int]] | None = None
    tokens: dict[str, list[int]] = field(default_factory=dict)
    digests: dict[str, list[bytes]] = field(default_factory=dict)
    outputs: dict[str, list[int]] = field(default_factory=dict)
    finished: set[str] = field(default_factory=set)
    in_flight: deque[Step] = field(default_factory=deque)
    failed_steps: int = 0
    before_step: Callable[[SchedulerOutput], None] | None = None
    after_load: Callable[[], None] | None = None

    @property
    def half(self) -> Any:
        return self.scheduler.connector._scheduler

    def add(self, request_id: str, prompt: list[int], max_tokens: int = 4, **options: Any) -> Request:
        sampling = SamplingParams(
            max_tokens=max_tokens, temperature=0, ignore_eos=True, **options.pop("sampling", {})
        )
        sampling.update_from_generation_config({}, 1)
        request = Request(
            request_id=request_id,
            prompt_token_ids=list(prompt),
            sampling_params=sampling,
            pooling_params=None,
            block_hasher=get_request_block_hasher(BLOCK, sha256),
            **options,
        )
        self.tokens[request_id] = list(prompt)
        self.digests[request_id] = []
        self.outputs[request_id] = []
        self.scheduler.add_request(request)
        return request

    def abort(self, request_id: str) -> None:
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
        self.finished.add(request_id)

    def step(self) -> SchedulerOutput:
        """Schedule and execute one step; take back the oldest result when enough are in flight."""
        output = self.scheduler.schedule()
        if self.before_step is not None:
            self.before_step(output)
        self.in_flight.append(Step(output, self._execute(output)))
        if len(self.in_flight) > self.overlap or not output.num_scheduled_tokens:
            self.take_back()
        return output

    def take_back(self) -> None:
        step = self.in_flight.popleft()
        results = self.scheduler.update_from_output(step.output, step.result)
        if self.drafts is not None and not isinstance(self.scheduler, AsyncScheduler):
            ids = list(step.output.num_scheduled_tokens)
            offers = [self.drafts(self.tokens[request_id]) for request_id in ids]
            self.scheduler.update_draft_token_ids(DraftTokenIds(ids, offers))
        for group in results.values():
            for out in group.outputs:
                self.outputs[out.request_id] += out.new_token_ids
                if out.finish_reason is not None:
                    self.finished.add(out.request_id)

    def run(self, deadline: float = 30.0) -> None:
        """Until nothing is left to do."""
        pause = threading.Event()
        end = time.monotonic() + deadline
        while time.monotonic() < end:
            if not (self.scheduler.has_requests() or self.in_flight):
                return
            if not self.scheduler.has_requests():
                self.take_back()
            elif not self.step().num_scheduled_tokens:
                pause.wait(0.001)  # as an engine that polls for an answer
        unfinished = self.outputs.keys() - self.finished
        raise AssertionError(f"requests did not end within {deadline} s: {unfinished}")

    def answer(self, prompt: list[int], max_tokens: int = 4, **options: Any) -> list[int]:
        """One request alone, to its end."""
        request_id = f"alone-{len(self.outputs)}"
        self.add(request_id, prompt, max_tokens, **options)
        self.run()
        return self.outputs[request_id]

    def forget_local(self) -> None:
        """Drop the engine's own prefix cache; the agent's stays."""
        assert self.scheduler.reset_prefix_cache()

    def close(self) -> None:
        self.scheduler.shutdown()
        for worker in self.workers:
            worker.close()

    # ---- the model runner

    def _execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        plan = output.kv_connector_metadata
        tables = {
            request_id: self.scheduler.kv_cache_manager.get_block_ids(request_id)[0]
            for request_id in output.num_scheduled_tokens
        }
        for worker in self.workers:
            worker.begin_step()
        if output.has_sync_kv_loads:
            for worker in self.workers:
                worker.start_loads(plan, overlap=True)
            if self.after_load is not None:
                self.after_load()
        for layer in range(LAYERS):
            for worker in self.workers:
                worker.wait_layer(f"layer.{layer}")
        broken = self._peek_failures(plan)
        sampled = [
            self._forward(output, request_id, scheduled, tables[request_id], broken)
            for request_id, scheduled in output.num_scheduled_tokens.items()
        ]
        connector_output = self._connector_output(plan)
        ids = list(output.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=sampled,
            kv_connector_output=connector_output,
        )

    def _connector_output(self, plan: Any) -> KVConnectorOutput | None:
        merged = None
        invalid: set[int] = set()
        for worker in self.workers:
            worker.save(plan)
            invalid |= worker.failed_pages()
            report = worker.report(plan)
            if report is not None:
                merged = report if merged is None else merged.aggregate(report)
        output = KVConnectorOutput(invalid_block_ids=invalid, kv_connector_worker_meta=merged)
        return None if output.is_empty() else output

    def _peek_failures(self, plan: Any) -> set[int]:
        """Pages whose load failed: the real model computes garbage from them, and is not blamed."""
        broken: set[int] = set()
        for worker in self.workers:
            worker._end_loads()
            broken |= worker._failed_pages
        return broken

    def _forward(
        self, output: SchedulerOutput, request_id: str, scheduled: int, table: list[int], broken: set[int]
    ) -> list[int]:
        request = self.scheduler.requests[request_id]
        start = self._start(output, request_id)
        tokens = self.tokens[request_id]
        drafts = output.scheduled_spec_decode_tokens.get(request_id, [])
        real = [draft for draft in drafts if draft >= 0] or self._own_drafts(drafts, tokens)
        start = min(start, len(tokens) - (scheduled - len(drafts)))  # the device corrects for rejections
        known = tokens + real
        end = start + scheduled
        failed = not broken.isdisjoint(table[: -(-start // BLOCK)])
        self.failed_steps += failed
        digests = extend(self.digests[request_id], tokens)
        if not failed:
            self._check(table, digests[:start])
        written = extend(list(digests), known)[: min(end, len(known))]
        self._write(table, start, [bytes(TOKEN_BYTES)] * len(written) if failed else written)
        if end < len(tokens) or failed:
            return [] if end < len(tokens) else [0]
        return self._sample(request_id, tokens, real, request)

    def _own_drafts(self, placeholders: list[int], tokens: list[int]) -> list[int]:
        return (self.drafts(tokens)[: len(placeholders)]) if placeholders and self.drafts else []

    def _sample(self, request_id: str, tokens: list[int], drafts: list[int], request: Request) -> list[int]:
        digests = self.digests[request_id]
        accepted: list[int] = []
        for draft in [*drafts, None]:
            accepted.append(says(digests[-1]))
            tokens.append(accepted[-1])
            extend(digests, tokens)
            if accepted[-1] != draft:
                break
        return accepted

    def _start(self, output: SchedulerOutput, request_id: str) -> int:
        for new in output.scheduled_new_reqs:
            if new.req_id == request_id:
                return new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        return cached.num_computed_tokens[cached.req_ids.index(request_id)]

    def _values(self, rank: int, layer: int, digests: list[bytes]) -> torch.Tensor:
        values = np.frombuffer(b"".join(digests), dtype=np.uint8).reshape(-1, TOKEN_BYTES).copy()
        values[:, 0] += rank
        values[:, 1] += layer
        return torch.from_numpy(values)

    def _write(self, table: list[int], start: int, digests: list[bytes]) -> None:
        positions = torch.arange(start, len(digests))
        rows = torch.tensor(table)[positions // BLOCK] * BLOCK + positions % BLOCK
        for rank, caches in enumerate(self.caches):
            for layer in range(LAYERS):
                flat = caches[f"layer.{layer}"].view(-1, TOKEN_BYTES)
                flat[rows] = self._values(rank, layer, digests)[start:]

    def _check(self, table: list[int], digests: list[bytes]) -> None:
        if not digests:
            return
        blocks = torch.tensor(table[: -(-len(digests) // BLOCK)])
        for rank, caches in enumerate(self.caches):
            for layer in range(LAYERS):
                found = caches[f"layer.{layer}"][blocks].view(-1, TOKEN_BYTES)[: len(digests)]
                wrong = (found != self._values(rank, layer, digests)).any(dim=1).nonzero()
                if len(wrong):
                    raise AssertionError(f"wrong KV at {wrong[:3].tolist()}, layer {layer}, rank {rank}")


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
        transfer = KVTransferConfig(
            kv_connector="KvistConnector",
            kv_connector_module_path=KvistConnector.__module__,
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"agent": str(self.agent.socket_path)},
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
            kv_transfer_config=transfer,
            device_config=DeviceConfig("cpu"),
            speculative_config=speculative,
        )

    def __call__(
        self, *, blocks: int = 600, asynchronous: bool = False, ready: bool = True, **options: Any
    ) -> Simulator:
        config = self.config(asynchronous, **options)
        spec = FullAttentionSpec(
            block_size=BLOCK, num_kv_heads=1, head_size=TOKEN_BYTES // 2, dtype=torch.uint8
        )
        names = [f"layer.{index}" for index in range(LAYERS)]
        page = BLOCK * TOKEN_BYTES
        cache = KVCacheConfig(
            num_blocks=blocks,
            kv_cache_tensors=[
                KVCacheTensor(
                    size=page * blocks * LAYERS, layers=names, layer_stride=page * blocks, block_stride=page
                )
            ],
            kv_cache_groups=[KVCacheGroupSpec(names, spec)],
        )
        config.cache_config.num_gpu_blocks = blocks
        config.scheduler_config.async_scheduling = asynchronous  # vLLM switches it off on CPUs
        init_none_hash(sha256)
        facts = read_config(config, cache)
        caches = [{name: torch.zeros(blocks, BLOCK, TOKEN_BYTES, dtype=torch.uint8) for name in names}]
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
            simulator.half._pump()
            if simulator.half._ledger.granted and all(w._next or w._current for w in simulator.workers):
                return
            pause.wait(0.005)
        raise AssertionError("the engine did not find its agent")


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
