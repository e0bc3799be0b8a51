"""Questions to agents and router over HTTP, with deadlines; what does not answer is said, not raised."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Final

import httpx

from kvist_connector.errors import KvistError

DEADLINE: Final = 5.0
_AT_ONCE: Final = 16

Answer = dict[str, Any]


class AskError(KvistError):
    """A program answered with an error, or not at all."""


@dataclass(frozen=True)
class Credentials:
    """Who asks, and whom it believes.

    `tls` has the own certificate and CAs; none: the system's CAs and no certificate. `agent_name` is in the
    certificates of agents, which are reached by addresses; `expected` in that of who is asked, else its host.
    """

    token: str = ""
    tls: ssl.SSLContext | None = None
    agent_name: str = ""
    expected: str = ""

    def for_agents(self) -> Credentials:
        """The same, to ask agents."""
        return self if self.tls is None else replace(self, expected=self.agent_name)


NOBODY: Final = Credentials()


def ask(
    method: str, url: str, body: Answer | None = None, deadline: float = DEADLINE, who: Credentials = NOBODY
) -> Any:
    """The JSON answer; raises AskError."""
    try:
        answer = request(method, url, body, deadline, who)
        if answer.status_code == httpx.codes.UNAUTHORIZED:
            raise AskError(f"{url} answered 401: {_message(answer)}; give its token with --token-file")
        if answer.is_error:
            raise AskError(f"{url} answered {answer.status_code}: {_message(answer)}")
        return answer.json()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise AskError(f"{url} does not answer: {str(error) or type(error).__name__}") from error
    except ValueError as error:
        raise AskError(f"{url} did not answer with JSON") from error


def request(method: str, url: str, body: Answer | None, deadline: float, who: Credentials) -> httpx.Response:
    """Whatever is answered; raises httpx.HTTPError, httpx.InvalidURL."""
    headers = {"Authorization": f"Bearer {who.token}"} if who.token else {}
    extensions = {"sni_hostname": who.expected} if who.expected else {}
    with httpx.Client(verify=who.tls or True, timeout=deadline, trust_env=False) as client:
        return client.request(method, url, json=body, headers=headers, extensions=extensions)


def ask_all(
    method: str,
    urls: Mapping[str, str],
    body: Answer | None = None,
    deadline: float = DEADLINE,
    who: Credentials = NOBODY,
) -> dict[str, Any]:
    """Answers by the names of `urls`; {"error": text} where there was none."""
    if not urls:
        return {}
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        futures = {
            name: pool.submit(_ask_or_say, method, url, body, deadline, who) for name, url in urls.items()
        }
        return {name: future.result() for name, future in futures.items()}


def answers_ok(url: str) -> bool:
    """Whether GET `url` is 200; a certificate is not checked, since nothing is told or learnt."""
    try:
        return httpx.get(url, timeout=DEADLINE, trust_env=False, verify=False).status_code == httpx.codes.OK
    except (httpx.HTTPError, httpx.InvalidURL):
        return False


def _ask_or_say(method: str, url: str, body: Answer | None, deadline: float, who: Credentials) -> Any:
    try:
        return ask(method, url, body, deadline, who)
    except AskError as error:
        return {"error": str(error)}


def _message(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return answer.text[:200]
