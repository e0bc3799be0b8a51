"""Published routing formulas, each with its source at a commit and its default parameters.

Called by bench/routing.py and bench/capacity73.py. Every one sees what its original sees: exact caches where
it reads KV events, its own dispatches where it does not. Where an original polls metrics, here it sees them
without delay.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Many
from random import Random
from typing import Final

from bench.simulation.engine import Engine
from bench.simulation.pool import BlockPool
from bench.simulation.trace import BLOCK_TOKENS, Request


class _Counting:
    """What all of them count: requests in flight, and prefill tokens on their way."""

    def __init__(self, engines: Many[Engine], seed: int) -> None:
        self.engines, self.random = engines, Random(seed)
        self.requests = [0] * len(engines)
        self.prefill = [0] * len(engines)
        self._tokens: dict[int, int] = {}

    def sent(self, request: Request, engine: int, tokens: int) -> int:
        self.requests[engine] += 1
        self.prefill[engine] += tokens
        self._tokens[request.number] = tokens
        return engine

    def first_token(self, request: Request, engine: int, now: float) -> None:
        self.prefill[engine] -= self._tokens.pop(request.number)

    def ended(self, request: Request, engine: int, now: float) -> None:
        self.requests[engine] -= 1

    def least(self, values: Many[float]) -> int:
        lowest = min(values)
        return self.random.choice([n for n, value in enumerate(values) if value == lowest])


class RoundRobin(_Counting):
    """Each in turn."""

    _next = 0

    def choose(self, request: Request, now: float) -> int:
        chosen, self._next = self._next, (self._next + 1) % len(self.engines)
        return self.sent(request, chosen, request.tokens)


class Uniform(_Counting):
    """Random."""

    def choose(self, request: Request, now: float) -> int:
        return self.sent(request, self.random.randrange(len(self.engines)), request.tokens)


class DynamoKv(_Counting):
    """NVIDIA Dynamo 07a6c9c, lib/kv-router/src/scheduling/selector/default.rs, defaults of ai-dynamo 1.6.1.

    cost = scale * max(0, prefill tokens / block - credit * overlap - host weight * host overlap)
           + decode blocks

    prefill tokens: those on their way there, and all of this prompt's; decode blocks: distinct blocks of
    requests in flight there, this one added. prefill_load_scale and overlap_score_credit 1, temperature 0,
    host_cache_hit_weight 0.75; decay and decode_active_request_weight 0.
    """

    HOST: Final = 0.75

    def __init__(self, engines: Many[Engine], seed: int) -> None:
        super().__init__(engines, seed)
        self._blocks: list[dict[int, int]] = [{} for _ in engines]
        self._partial = [0] * len(engines)

    def choose(self, request: Request, now: float) -> int:
        costs, hits = [], []
        for number, engine in enumerate(self.engines):
            hit, blocks = engine.pool.hit(request.blocks), self._blocks[number]
            more = sum(block not in blocks for block in request.blocks) + 1
            cached = hit * BLOCK_TOKENS
            raw = (self.prefill[number] + max(0, request.tokens - cached) + cached) / BLOCK_TOKENS
            credit = hit + self.HOST * engine.pool.host_hit(request.blocks, hit)
            costs.append(max(0.0, raw - credit) + len(blocks) + self._partial[number] + more)
            hits.append(cached)
        chosen = self.least(costs)
        for block in request.blocks:
            self._blocks[chosen][block] = self._blocks[chosen].get(block, 0) + 1
        self._partial[chosen] += 1
        return self.sent(request, chosen, max(0, request.tokens - hits[chosen]))

    def ended(self, request: Request, engine: int, now: float) -> None:
        super().ended(request, engine, now)
        self._partial[engine] -= 1
        blocks = self._blocks[engine]
        for block in request.blocks:
            blocks[block] -= 1
            if not blocks[block]:
                del blocks[block]


class _LlmD(_Counting):
    """llm-d-router ebab687: weighted sum of scores in 0..1, max-score-picker, ties at random.

    queue-scorer: (most - waiting) / (most - least), 1 when equal; kv-cache-utilization-scorer: 1 - share of
    KV blocks in use; prefix-cache-scorer: matched / all blocks (pkg/epp/framework/plugins/scheduling/scorer).
    """

    PREFIX: float
    QUEUE: float
    SPACE: float

    def prefix(self, request: Request) -> list[float]:
        raise NotImplementedError

    def choose(self, request: Request, now: float) -> int:
        waiting = [len(engine.waiting) for engine in self.engines]
        most, fewest = max(waiting), min(waiting)
        scores = []
        for engine, queue, prefix in zip(self.engines, waiting, self.prefix(request), strict=True):
            spread = (most - queue) / (most - fewest) if most > fewest else 1.0
            space = 1 - engine.pool.active / engine.pool.total
            scores.append(-(self.PREFIX * prefix + self.QUEUE * spread + self.SPACE * space))
        return self.sent(request, self.least(scores), request.tokens)


class LlmdPrecise(_LlmD):
    """deploy/config/epp-precise-prefix-cache-config.yaml: leading blocks by KV events, weights 2, 1, 1.

    A block in host memory counts 0.8 (llm-d-kv-cache, DefaultKVCacheBackendConfig). No speculative entries:
    that is the default.
    """

    PREFIX, QUEUE, SPACE, HOST = 2.0, 1.0, 1.0, 0.8

    def prefix(self, request: Request) -> list[float]:
        return [
            self._matched(engine.pool, request.blocks) / max(1, len(request.blocks))
            for engine in self.engines
        ]

    def _matched(self, pool: BlockPool, blocks: Many[int]) -> float:
        hit = pool.hit(blocks)
        return hit + self.HOST * pool.host_hit(blocks, hit)


class LlmdApproximate(_LlmD):
    """config/charts/routerlib's default: leading blocks in an LRU of own dispatches, weights 3, 2, 2.

    approx-prefix-cache-producer with autoTune: the LRU has as many blocks as the engine. The prompts here are
    below its limit of 131,072 tokens.
    """

    PREFIX, QUEUE, SPACE = 3.0, 2.0, 2.0

    def __init__(self, engines: Many[Engine], seed: int) -> None:
        super().__init__(engines, seed)
        self._sent: list[OrderedDict[int, None]] = [OrderedDict() for _ in engines]

    def prefix(self, request: Request) -> list[float]:
        return [leading(request.blocks, sent) / max(1, len(request.blocks)) for sent in self._sent]

    def sent(self, request: Request, engine: int, tokens: int) -> int:
        remember(self._sent[engine], request.blocks, self.engines[engine].pool.total)
        return super().sent(request, engine, tokens)


class VllmCacheAware(_Counting):
    """vllm-router 0.1.17 `cache_aware`: a tree of own dispatches, unless requests are out of balance.

    Out of balance: most - least > 64 requests and most > 1.5 * least: then the least loaded. Else the worker
    with the longest match if that is over 0.3 of the prompt, else the one with the smallest tree
    (src/policies/cache_aware.rs at 16917f4; defaults of router_args.py: cache_threshold,
    balance_abs_threshold, balance_rel_threshold, max_tree_size).
    """

    THRESHOLD: Final = 0.3
    ABSOLUTE: Final = 64
    RELATIVE: Final = 1.5
    CAPACITY: Final = 2**25 // 4 // BLOCK_TOKENS  # max_tree_size, in characters

    def __init__(self, engines: Many[Engine], seed: int) -> None:
        super().__init__(engines, seed)
        self._trees: list[OrderedDict[int, None]] = [OrderedDict() for _ in engines]

    def choose(self, request: Request, now: float) -> int:
        most, fewest = max(self.requests), min(self.requests)
        matches = [leading(request.blocks, tree) for tree in self._trees]
        if most - fewest > self.ABSOLUTE and most > self.RELATIVE * fewest:
            chosen = self.least(self.requests)
        elif max(matches) * BLOCK_TOKENS > self.THRESHOLD * request.tokens:
            chosen = self.least([-match for match in matches])
        else:
            chosen = self.least([len(tree) for tree in self._trees])
        remember(self._trees[chosen], request.blocks, self.CAPACITY)
        return self.sent(request, chosen, request.tokens)


class ProductionStack(_Counting):
    """vLLM production-stack a6c01db `prefixaware`: longest match in a trie of own dispatches.

    Equals at random. The trie is never pruned and load is not looked at (PrefixAwareRouter in
    src/vllm_router/routers/routing_logic.py; prefix_min_match_length 0).
    """

    def __init__(self, engines: Many[Engine], seed: int) -> None:
        super().__init__(engines, seed)
        self._tries: list[set[int]] = [set() for _ in engines]

    def choose(self, request: Request, now: float) -> int:
        chosen = self.least([-leading(request.blocks, trie) for trie in self._tries])
        self._tries[chosen].update(request.blocks)
        return self.sent(request, chosen, request.tokens)


def leading(blocks: Many[int], known: OrderedDict[int, None] | set[int]) -> int:
    """Leading blocks that are known."""
    count = 0
    for block in blocks:
        if block not in known:
            break
        count += 1
    return count


def remember(known: OrderedDict[int, None], blocks: Many[int], capacity: int) -> None:
    """Blocks become the most recent, prefixes after tails; the oldest beyond `capacity` go."""
    for block in reversed(blocks):
        known[block] = None
        known.move_to_end(block)
    while len(known) > capacity:
        known.popitem(last=False)
