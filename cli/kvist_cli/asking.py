"""Questions to agents and router over HTTP, with deadlines; what does not answer is said, not raised."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import httpx

from kvist_connector.errors import KvistError

DEADLINE: Final = 5.0
_AT_ONCE: Final = 16

Answer = dict[str, Any]


class AskError(KvistError):
    """A program answered with an error, or not at all."""


def ask(
    method: str, url: str, body: Answer | None = None, deadline: float = DEADLINE, token: str = ""
) -> Any:
    """The JSON answer; raises AskError."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        answer = httpx.request(method, url, json=body, headers=headers, timeout=deadline, trust_env=False)
        if answer.status_code == httpx.codes.UNAUTHORIZED:
            raise AskError(f"{url} answered 401: {_message(answer)}; give its token with --token-file")
        if answer.is_error:
            raise AskError(f"{url} answered {answer.status_code}: {_message(answer)}")
        return answer.json()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise AskError(f"{url} does not answer: {str(error) or type(error).__name__}") from error
    except ValueError as error:
        raise AskError(f"{url} did not answer with JSON") from error


def ask_all(
    method: str,
    urls: Mapping[str, str],
    body: Answer | None = None,
    deadline: float = DEADLINE,
    token: str = "",
) -> dict[str, Any]:
    """Answers by the names of `urls`; {"error": text} where there was none."""
    if not urls:
        return {}
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        futures = {
            name: pool.submit(_ask_or_say, method, url, body, deadline, token) for name, url in urls.items()
        }
        return {name: future.result() for name, future in futures.items()}


def answers_ok(url: str) -> bool:
    """Whether GET `url` is 200; a certificate is not checked, since nothing is told or learnt."""
    try:
        return httpx.get(url, timeout=DEADLINE, trust_env=False, verify=False).status_code == httpx.codes.OK
    except (httpx.HTTPError, httpx.InvalidURL):
        return False


def _ask_or_say(method: str, url: str, body: Answer | None, deadline: float, token: str) -> Any:
    try:
        return ask(method, url, body, deadline, token)
    except AskError as error:
        return {"error": str(error)}


def _message(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return answer.text[:200]
