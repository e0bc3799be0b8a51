"""The ASGI application of the hot paths: body in, decision, one or two attempts, bytes out.

Called by app.py's dispatcher. Status and headers are sent with the first body byte, so until then
the request may go to another replica: once, within the retry budget. Whatever way a request
ends, the mind hears of it exactly once per attempt.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import msgspec
from starlette.types import Receive, Scope, Send

from kvist_router.errors import Refused, UpstreamError
from kvist_router.metrics import RelayMetrics
from kvist_router.mind.interface import Decision, Metadata, Mind, Refusal, Report
from kvist_router.relay import answers
from kvist_router.relay.body import Bodies, Body, ClientGone
from kvist_router.relay.budget import RetryBudget
from kvist_router.relay.continuation import continuable
from kvist_router.relay.headers import (
    is_event_stream,
    kvist_headers,
    request_headers,
    response_headers,
)
from kvist_router.relay.paths import Route, route
from kvist_router.relay.spent import answer_tokens
from kvist_router.relay.story import Story, whole_text
from kvist_router.relay.upstream import Attempt, Upstream
from kvist_router.relay.watch import Reason, Watch, Watchdog
from kvist_router.settings import LimitSettings

TENANT = "kvist.tenant"  # in the scope of a request: who sends it, as access/door.py found

_FIRST_BYTE = Report("first_byte")
_ENDS = ("ended", "rejected", "refused", "cancelled", "failed")
_REPORTED = Report("failed")  # the mind has heard of this attempt's end already
_LATE = {
    "body": answers.SLOW_BODY,
    "decision": answers.NO_DECISION,
    "first byte": answers.TOO_LATE,
    "no progress": answers.TOO_LATE,
}
COMPLETIONS, DETOKENIZE = "/v1/completions", b"/detokenize"
_MOST_TEXT = 4096  # bytes of the answer to a question about a few tokens

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Exchange:
    """One request on its way."""

    scope: Scope
    send: Send
    watch: Watch
    body: bytes  # as the mind reads it
    metadata: Metadata
    started: float
    whole: Body
    answered: bool = False  # status and headers are out
    story: Story | None = None  # of an answer that may go on at another replica
    continued: int = 0  # how often it did


class Relay:
    """ASGI for the paths of relay/paths.py; the dispatcher sends nothing else here."""

    def __init__(
        self,
        mind: Mind,
        upstream: Upstream,
        limits: LimitSettings,
        metrics: RelayMetrics,
        queue_seconds: float = 0.0,
    ) -> None:
        self._mind = mind
        self._upstream = upstream
        self._limits = limits
        self._decision_seconds = limits.decide_seconds + limits.queue_seconds + queue_seconds
        self._metrics = metrics
        self._budget = RetryBudget(limits.retry_ratio)
        self._dog = Watchdog()
        self._bodies = Bodies()
        metrics.in_flight.set_function(lambda: len(self._dog))
        # Looked up once: finding a labelled series costs as much as counting in it.
        self._ttft = [metrics.ttft.labels(cache) for cache in ("cold", "warm")]
        self._ends = {end: metrics.requests.labels(end) for end in _ENDS}
        self._itl = [metrics.itl.labels(cache) for cache in ("cold", "warm")]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked = route(scope["path"])
        assert asked is not None  # see the class
        if scope["method"] != asked.method:
            await answers.send_refusal(
                send, answers.not_allowed(asked.method), [(b"allow", asked.method.encode())]
            )
            return
        outcome = "failed"
        try:
            outcome = await self._serve(scope, receive, send, asked)
        except Refused as refused:
            outcome = "refused"
            await answers.send_refusal(send, refused.refusal)
        except ClientGone:
            outcome = "cancelled"
        finally:
            self._ends[outcome].inc()

    async def _serve(self, scope: Scope, receive: Receive, send: Send, asked: Route) -> str:
        started = time.monotonic()
        headers = scope["headers"]
        answered = False
        with self._dog.watch(receive) as watch:
            watch.phase("body", self._limits.body_seconds)
            body = await self._bodies.read(receive, headers, self._limits)
            metadata = Metadata(
                asked.path, scope.get(TENANT, ""), response=asked.response, skimmed=body.skimmed
            )
            exchange = _Exchange(scope, send, watch, body.text, metadata, started, body)
            try:
                return await self._route(exchange)
            except (Refused, ClientGone):
                raise
            except Exception as error:  # the boundary of a request: the client gets an answer in any case
                _log.exception("request failed in the router")
                if exchange.answered:
                    return "failed"
                raise Refused(answers.INTERNAL) from error
            finally:
                body.close()
                answered = exchange.answered
        if watch.reason == "client gone":
            raise ClientGone
        if not answered:
            raise Refused(_LATE[watch.reason])
        return "failed"  # the client sees a truncated answer: its connection is closed

    async def _route(self, exchange: _Exchange) -> str:
        self._budget.request()
        may = self._limits.continuations > 0 and not exchange.whole.skimmed
        asked = continuable(exchange.body, exchange.metadata.path) if may else None
        if asked is not None:
            exchange.story, exchange.body = Story(asked), asked.body
        decision = await self._decide(exchange, exchange.metadata)
        result = await self._attempt(exchange, decision, may_retry=True)
        while isinstance(result, Decision):
            result = await self._attempt(exchange, result, may_retry=False)
        return result

    async def _decide(self, exchange: _Exchange, metadata: Metadata) -> Decision:
        exchange.watch.phase("decision", self._decision_seconds)
        decision = await self._mind.decide(exchange.body, metadata)
        if isinstance(decision, Refusal):
            raise Refused(decision)
        return decision

    async def _attempt(self, exchange: _Exchange, decision: Decision, may_retry: bool) -> str | Decision:
        """Relay one replica's answer: how it ended, or the decision for the second attempt."""
        attempt: Attempt | None = None
        end: Report | None = None
        try:
            attempt = await self._open(exchange, decision)
            if exchange.answered and attempt.status != 200:
                raise UpstreamError(f"status {attempt.status} for the rest of an answer")
            if attempt.status < 500:
                await self._mind.report(decision.id, _FIRST_BYTE)
            else:
                end = await self._fail(decision, UpstreamError(f"status {attempt.status}"))
                second = await self._second(exchange, decision) if may_retry else None
                if second is not None:
                    return second
            tokens = await self._relay(exchange, decision, attempt)
            if end is None:
                end = _ended(attempt.status, tokens)
            return _outcome(attempt.status)
        except UpstreamError as error:
            end = await self._fail(decision, error)
            if exchange.answered:
                return await self._broken(exchange, decision, attempt, error)
            return await self._failed(exchange, decision, error, may_retry)
        finally:
            if attempt is not None:
                attempt.close()
            if end is not _REPORTED:
                await self._mind.report(decision.id, end or _stopped(exchange.watch.reason))

    async def _fail(self, decision: Decision, error: UpstreamError) -> Report:
        """Report a failed attempt now: a retry has the same id."""
        self._metrics.upstream_error(decision.replica)
        _log.warning("request %s failed at %s: %s", decision.id, decision.replica, error)
        await self._mind.report(decision.id, Report("failed", str(error), error.unreachable))
        return _REPORTED

    async def _failed(
        self, exchange: _Exchange, decision: Decision, error: UpstreamError, may_retry: bool
    ) -> str | Decision:
        second = await self._second(exchange, decision) if may_retry else None
        if second is None:
            raise Refused(answers.bad_gateway(f"{decision.replica}: {error}")) from error
        return second

    async def _second(self, exchange: _Exchange, first: Decision) -> Decision | None:
        """The decision for a retry on another replica; None when there is none or the budget is spent."""
        if not self._budget.retry():
            return None
        try:
            second = await self._decide(exchange, _elsewhere(exchange, first))
        except Refused:
            return None
        self._metrics.retries.inc()
        return second

    async def _broken(
        self, exchange: _Exchange, decision: Decision, attempt: Attempt | None, error: UpstreamError
    ) -> str | Decision:
        """An answer broke off in the middle: the decision for its rest, or "failed"."""
        following = await self._following(exchange, decision)
        if following is not None:
            return following
        # A story's client has whole events of a stream only.
        if exchange.story is not None or (attempt is not None and is_event_stream(attempt.headers)):
            await _break_off(exchange.send, error)
        return "failed"  # the client sees a truncated answer: its connection is closed

    async def _following(self, exchange: _Exchange, broken: Decision) -> Decision | None:
        """Who goes on with a broken answer; None when that is not exact, wanted, or in the budget."""
        story = exchange.story
        if story is None:
            return None
        may = exchange.continued < self._limits.continuations and self._budget.retry()
        body = story.resume(broken.context_tokens) if may else None
        if body is None:
            self._metrics.continuations.labels("refused").inc()
            reason = story.obstacle if may else "as often as it may it did, or the budget of retries is spent"
            _log.warning("request %s does not go on elsewhere: %s", broken.id, reason)
            return None
        exchange.continued += 1
        exchange.body = body
        exchange.scope = {**exchange.scope, "path": COMPLETIONS, "query_string": b""}
        exchange.metadata = msgspec.structs.replace(_elsewhere(exchange, broken), path="completions")
        try:
            return await self._decide(exchange, exchange.metadata)
        except Refused:
            self._metrics.continuations.labels("refused").inc()
            return None

    async def _check_whole(self, exchange: _Exchange, decision: Decision, tail: list[int]) -> None:
        """Raise UpstreamError if the text so far ends within a character: the rest would begin wrongly."""
        exchange.watch.phase("first byte", self._limits.first_byte_seconds)
        headers = request_headers(exchange.scope["headers"], decision.id)
        asked = msgspec.json.encode({"tokens": tail})
        attempt = await self._upstream.open(decision.url, DETOKENIZE, headers, asked)
        try:
            piece = attempt.first if attempt.status == 200 else b""
            text = piece
            while piece and len(text) < _MOST_TEXT:
                piece = await attempt.read()
                text += piece
            whole_text(text)
        finally:
            attempt.close()

    async def _open(self, exchange: _Exchange, decision: Decision) -> Attempt:
        if exchange.story is not None and exchange.continued and exchange.story.tail:
            await self._check_whole(exchange, decision, exchange.story.tail)
        exchange.watch.phase("first byte", self._limits.first_byte_seconds)
        target, query = exchange.scope["path"].encode(), exchange.scope["query_string"]
        if query:
            target += b"?" + query
        headers = request_headers(exchange.scope["headers"], decision.id)
        body = exchange.whole.outgoing(exchange.body if decision.body is None else decision.body)
        method = exchange.scope["method"].encode()
        return await self._upstream.open(decision.url, target, headers, body, method)

    async def _relay(self, exchange: _Exchange, decision: Decision, attempt: Attempt) -> int:
        """Relay the answer; its tokens."""
        if exchange.answered:
            self._metrics.continuations.labels("continued").inc()
            return await self._tell(exchange, attempt)
        first_at = time.monotonic()
        exchange.answered = True
        added = kvist_headers(decision.id, decision.replica, decision.predicted_tokens, decision.routed_by)
        headers = response_headers(attempt.headers, added)
        await exchange.send({"type": "http.response.start", "status": attempt.status, "headers": headers})
        if exchange.story is not None and attempt.status == 200 and is_event_stream(attempt.headers):
            warm = decision.predicted_tokens > 0
            self._ttft[warm].observe(first_at - exchange.started)
            tokens = await self._tell(exchange, attempt)
            if tokens > 1:
                self._itl[warm].observe((time.monotonic() - first_at) / (tokens - 1))
            return tokens
        exchange.story = None
        pieces, tail = await self._pieces(exchange, attempt)
        if decision.stream and attempt.status < 400:
            warm = decision.predicted_tokens > 0
            self._ttft[warm].observe(first_at - exchange.started)
            if pieces > 1:
                self._itl[warm].observe((time.monotonic() - first_at) / (pieces - 1))
        return answer_tokens(tail, pieces if decision.stream else 0)

    async def _pieces(self, exchange: _Exchange, attempt: Attempt) -> tuple[int, tuple[bytes, bytes]]:
        """Relay the body as it comes; the last piece known to be the last goes out with the end.

        How many there were, and the last two.
        """
        send, piece, pieces, before = exchange.send, attempt.first, 0, b""
        phase, idle = exchange.watch.phase, self._limits.idle_seconds
        while piece:
            phase("no progress", idle)
            pieces += 1
            if attempt.ended:
                break
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            before, piece = piece, await attempt.read()
        await send({"type": "http.response.body", "body": piece})
        return pieces, (before, piece)

    async def _tell(self, exchange: _Exchange, attempt: Attempt) -> int:
        """Relay a stream whose events the story follows; its tokens."""
        story, piece = exchange.story, attempt.first
        assert story is not None  # see the callers
        while piece:
            exchange.watch.phase("no progress", self._limits.idle_seconds)
            told = story.feed(piece)
            if told:
                await exchange.send({"type": "http.response.body", "body": told, "more_body": True})
            if story.fault is not None:
                raise story.fault
            piece = await attempt.read()
        story.ended()
        await exchange.send({"type": "http.response.body", "body": b""})
        return story.tokens

    def use(self, limits: LimitSettings, queue_seconds: float) -> None:
        """Other limits for what comes from now on."""
        self._limits = limits
        self._decision_seconds = limits.decide_seconds + limits.queue_seconds + queue_seconds
        self._budget.use(limits.retry_ratio)


def _ended(status: int, tokens: int) -> Report:
    return Report("ended", "" if status < 400 else f"status {status}", tokens=tokens)


def _outcome(status: int) -> str:
    if status < 400:
        return "ended"
    return "rejected" if status < 500 else "failed"


async def _break_off(send: Send, error: UpstreamError) -> None:
    """A stream's last event says why it is the last; the answer stays without its end."""
    # The blank line ends an event that the engine left half sent.
    event = b"\n\ndata: " + answers.error_body(answers.broken_stream(str(error))) + b"\n\n"
    await send({"type": "http.response.body", "body": event, "more_body": True})


def _elsewhere(exchange: _Exchange, failed: Decision) -> Metadata:
    """What the mind needs for another replica than all that have failed."""
    tried = (*exchange.metadata.exclude, failed.replica)
    return msgspec.structs.replace(exchange.metadata, id=failed.id, exclude=tried)


def _stopped(reason: Reason) -> Report:
    """The end of an attempt that was cancelled."""
    return Report("failed", error=f"deadline: {reason}") if reason in _LATE else Report("cancelled")
