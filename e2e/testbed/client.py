"""Clients of a cluster's router, from the machine through the Service: plain HTTP and the OpenAI SDK."""

from __future__ import annotations

import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import openai

from kvist_connector import names
from kvist_operator.render.kube.pods import TOKEN_FILE
from testbed.bed import BedError
from testbed.kube import Kubectl

ASK_ADMIN = """
import json, pathlib, sys, urllib.error, urllib.request
url, token = sys.argv[1:]
token = pathlib.Path(token).read_text().strip() if token.startswith("/") else token
asked = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
try:
    answer = urllib.request.urlopen(asked, timeout=30)
except urllib.error.HTTPError as error:
    answer = error
print(json.dumps([answer.status, answer.read().decode()]))
"""
# Long enough for several chunks of 256 tokens, and the same every time.
PROMPT = " ".join(
    f"The {number}th branch of the tree carries {number * 7} leaves." for number in range(1, 90)
)


@dataclass(frozen=True)
class Answer:
    """One completion."""

    text: str
    request: str
    """x-kvist-request-id"""
    replica: str
    predicted: int
    """Prompt tokens that the router expected to be reused."""
    tokens: int
    """Of the prompt."""
    reused: int
    """Prompt tokens that the engine did not compute; 0 unless it runs with --enable-prompt-tokens-details."""
    routed_by: str = ""
    """`hash` when the router chose without its index."""


@dataclass(frozen=True)
class Client:
    """Requests to one router Service."""

    base: str
    model: str
    key: str = ""
    """An API key; none is sent when it is empty."""
    trust: ssl.SSLContext | None = None
    """Of https."""

    def complete(self, prompt: str = PROMPT, tokens: int = 8, seconds: float = 120) -> Answer:
        """A greedy completion. BedError with what the router said."""
        try:
            request = self.completion(prompt, tokens)
            with urllib.request.urlopen(request, timeout=seconds, context=self.trust) as answer:
                said, headers = json.load(answer), answer.headers
        except urllib.error.HTTPError as error:
            raise BedError(f"the router answered {error.code}: {error.read(2000).decode()}") from error
        return answered(said["choices"][0]["text"], headers, said["usage"])

    def completion(self, prompt: str, tokens: int, **more: Any) -> urllib.request.Request:
        """To be sent; `more`: further fields of the body."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, **more}
        authorization = {"authorization": f"Bearer {self.key}"} if self.key else {}
        return urllib.request.Request(
            f"{self.base}/v1/completions",
            data=json.dumps(body).encode(),
            headers={"content-type": "application/json", **authorization},
        )

    def chat(self, content: str = PROMPT, tokens: int = 8, seconds: float = 120) -> Answer:
        """A greedy answer by the OpenAI SDK, which raises an error of its own."""
        with openai.OpenAI(
            base_url=f"{self.base}/v1", api_key="unused", max_retries=0, timeout=seconds
        ) as sdk:
            raw = sdk.chat.completions.with_raw_response.create(
                model=self.model,
                messages=[{"role": "user", "content": content}],
                max_tokens=tokens,
                temperature=0,
            )
            said = raw.parse()
        usage = said.usage.model_dump() if said.usage is not None else {}
        return answered(said.choices[0].message.content or "", raw.headers, usage)


def answered(text: str, headers: Mapping[str, str], usage: Mapping[str, Any]) -> Answer:
    """From what the router and the engine said."""
    return Answer(
        text,
        headers["x-kvist-request-id"],
        headers["x-kvist-replica"],
        int(headers.get("x-kvist-predicted-tokens") or 0),
        usage["prompt_tokens"],
        (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        headers.get("x-kvist-routed-by") or "",
    )


def service_client(kubectl: Kubectl, namespace: str, cluster: str, model: str) -> Client:
    """A client of a cluster's router Service, by its address: the machine does not resolve cluster names."""
    service = kubectl.get(f"service/{cluster}-router", f"--namespace={namespace}")
    return Client(f"http://{service['spec']['clusterIP']}:{service['spec']['ports'][0]['port']}", model)


def admin(
    kubectl: Kubectl, namespace: str, cluster: str, path: str, token: str = TOKEN_FILE
) -> tuple[int, str]:
    """What a router's admin port answers when it is asked from within its pod: status and text.

    `token`: itself, or the path of a file with it, as that of the agents' token.
    """
    where = (f"deployment/{cluster}-router", f"--namespace={namespace}")
    url = f"http://127.0.0.1:{names.PORT_ROUTER_ADMIN}{path}"
    status, text = json.loads(kubectl("exec", *where, "--", "python3", "-c", ASK_ADMIN, url, token))
    return status, text


def decision(kubectl: Kubectl, namespace: str, cluster: str, request: str) -> dict[str, Any]:
    """The router's record of a request."""
    status, text = admin(kubectl, namespace, cluster, f"{names.PATH_DECISIONS}/{request}")
    if status != 200:
        raise BedError(f"the router answered {status} for the decision of {request}: {text[:2000]}")
    found: dict[str, Any] = json.loads(text)
    return found
