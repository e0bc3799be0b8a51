"""One engine: vLLM's own scheduler and the real worker half, over the simulated model.

Every forward pass checks that all KV it attends to is right, so a wrong load, a wrong key
or a page touched too late is a wrong token or a failed check, not a matter of luck.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from tests.connector.engines.simulated_model import BLOCK, LAYERS, TOKEN_BYTES, extend, says
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from kvist_connector.engines.vllm.connector import KvistConnector
from kvist_connector.engines.vllm.scheduler import SchedulerHalf
from kvist_connector.engines.vllm.worker import WorkerHalf


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
    def connector(self) -> KvistConnector:
        return self.scheduler.connector

    @property
    def half(self) -> SchedulerHalf:
        return self.connector.scheduler_half

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
        invalid = self._load_errors()
        sampled = [
            self._forward(output, request_id, scheduled, tables[request_id], invalid)
            for request_id, scheduled in output.num_scheduled_tokens.items()
        ]
        connector_output = self._connector_output(plan, invalid)
        ids = list(output.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=sampled,
            kv_connector_output=connector_output,
        )

    def _connector_output(self, plan: Any, invalid: set[int]) -> KVConnectorOutput | None:
        merged = None
        for worker in self.workers:
            worker.save(plan)
            report = worker.report(plan)
            if report is not None:
                merged = report if merged is None else merged.aggregate(report)
        output = KVConnectorOutput(invalid_block_ids=invalid, kv_connector_worker_meta=merged)
        return None if output.is_empty() else output

    def _load_errors(self) -> set[int]:
        """Pages whose load failed: the real model computes garbage from them, and is not blamed."""
        return set[int]().union(*(worker.failed_pages() for worker in self.workers))

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
