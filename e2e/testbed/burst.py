"""Many requests at one moment, and how each was answered."""

from __future__ import annotations

import urllib.error
import urllib.request
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from testbed.client import PROMPT, Client

SECONDS = 600


@dataclass(frozen=True)
class Reply:
    """Of one request; `retry_after` as the header says it, None without one."""

    status: int
    retry_after: str | None


def burst(client: Client, count: int, pool: ThreadPoolExecutor) -> list[Future[Reply]]:
    """Send `count` requests at once; each is answered in its own time. The pool has a thread for each."""
    return [pool.submit(_ask, client) for _ in range(count)]


def _ask(client: Client) -> Reply:
    try:
        with urllib.request.urlopen(client.completion(PROMPT, 4), timeout=SECONDS) as answer:
            answer.read()
            return Reply(answer.status, answer.headers["retry-after"])
    except urllib.error.HTTPError as error:
        return Reply(error.code, error.headers["retry-after"])
