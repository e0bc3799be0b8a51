"""Replay the trace against a cluster, two passengers writing at a time.

Called by the demo once for each mode. Turn by turn what the client measured is joined with
what the router recorded; without a connector the engine's own usage says what it reused.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import httpx

from kvist_cli.demo import sources
from kvist_cli.demo.client import Reply, chat
from kvist_cli.demo.figures import Replay, TurnResult
from kvist_cli.demo.manifests import SERVED_NAME
from kvist_cli.demo.trace import Message, Trace, Turn
from kvist_cli.local import Urls

# With one at a time a queue never forms and one engine would do; as many as there are engines keep both busy.
AT_A_TIME = 2
WARM_UP = [{"role": "user", "content": "Hello"}]


@dataclass(frozen=True)
class Target:
    """A cluster to send to."""

    mode: str
    urls: Urls
    client: httpx.Client

    def wait_routable(self, replicas: Collection[str]) -> None:
        """Wait until the router uses these and, where they have agents, knows what they hold."""
        mirrored = bool(self.urls.agents)
        sources.wait_routable(self.client, self.urls.router_admin, replicas, mirrored=mirrored)

    def warm_up(self) -> None:
        """One short request to each engine, past the router: the first ones pay for what no mode is about."""
        for base in self.urls.engines.values():
            chat(self.client, base, SERVED_NAME, WARM_UP, 2)

    def ask(self, trace: Trace, turn: Turn, answers: Mapping[str, str]) -> tuple[TurnResult, str]:
        """Send one turn; returns its figures and the answer."""
        messages = trace.messages(turn, answers)
        reply = chat(self.client, self.urls.router, SERVED_NAME, messages, trace.max_tokens)
        return self._result(turn, reply), reply.text

    def tokens(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation, as the engines see it."""
        engine = next(iter(self.urls.engines.values()))
        body = {"model": SERVED_NAME, "messages": list(messages), "add_generation_prompt": False}
        tokens: list[int] = sources.post(self.client, f"{engine}/tokenize", body)["tokens"]
        return tokens

    def _result(self, turn: Turn, reply: Reply) -> TurnResult:
        outcome = self._outcome(reply)
        return TurnResult(
            turn=turn.name,
            replica=reply.replica,
            warm=turn.warm,
            prompt_tokens=reply.prompt_tokens,
            completion_tokens=reply.completion_tokens,
            predicted_tokens=reply.predicted_tokens,
            hits=outcome.hits,
            ttft=reply.ttft,
            gaps=reply.gaps,
            load_seconds=outcome.load_seconds,
        )

    def _outcome(self, reply: Reply) -> sources.Outcome:
        found = None
        if self.urls.agents:
            found = sources.outcome(self.client, self.urls.router_admin, reply.request_id)
        return found or sources.Outcome({"gpu": reply.cached_tokens}, 0.0)


def replay(
    target: Target,
    trace: Trace,
    answers: dict[str, str],
    on_turn: Callable[[TurnResult], None],
    clock: Callable[[], float] = time.monotonic,
) -> Replay:
    """Send all turns. Answers that `answers` lacks are added: the first replay makes them."""
    target.wait_routable(target.urls.engines)
    target.warm_up()
    before = sources.traffic(target.client, target.urls.agents)
    started, done = clock(), {}
    waiting = list(trace.turns)
    running: dict[Future[tuple[TurnResult, str]], Turn] = {}
    passengers = ThreadPoolExecutor(AT_A_TIME, thread_name_prefix="passenger")
    try:
        while waiting or running:
            while len(running) < AT_A_TIME and (turn := _next(waiting, running.values())) is not None:
                waiting.remove(turn)
                running[passengers.submit(target.ask, trace, turn, dict(answers))] = turn
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                turn = running.pop(future)
                result, answer = future.result()
                answers.setdefault(turn.name, answer)
                done[turn.name] = result
                on_turn(result)
    finally:
        passengers.shutdown(wait=False, cancel_futures=True)  # Ctrl-C does not wait for answers
    moved = sources.traffic(target.client, target.urls.agents).since(before)
    turns = tuple(done[turn.name] for turn in trace.turns)
    return Replay(target.mode, turns, clock() - started, moved)


def _next(waiting: Sequence[Turn], running: Collection[Turn]) -> Turn | None:
    """The first turn in the trace's order whose session has none under way."""
    busy = {turn.session for turn in running}
    return next((turn for turn in waiting if turn.session not in busy), None)
