"""A client of a cluster's router: plain HTTP from the machine through the Service."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

from testbed.bed import BedError
from testbed.kube import Kubectl

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


@dataclass(frozen=True)
class Client:
    """Requests to one router Service."""

    base: str
    model: str

    def complete(self, prompt: str = PROMPT, tokens: int = 8, seconds: float = 120) -> Answer:
        """A greedy completion. BedError with what the router said."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
        request = urllib.request.Request(
            f"{self.base}/v1/completions",
            data=json.dumps(body).encode(),
            headers={"content-type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=seconds) as answer:
                said, headers = json.load(answer), answer.headers
        except urllib.error.HTTPError as error:
            raise BedError(f"the router answered {error.code}: {error.read(2000).decode()}") from error
        return Answer(
            said["choices"][0]["text"],
            headers["x-kvist-request-id"],
            headers["x-kvist-replica"],
            int(headers.get("x-kvist-predicted-tokens") or 0),
            said["usage"]["prompt_tokens"],
            (said["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        )


def service_client(kubectl: Kubectl, namespace: str, cluster: str, model: str) -> Client:
    """A client of a cluster's router Service, by its address: the machine does not resolve cluster names."""
    service = kubectl.get(f"service/{cluster}-router", f"--namespace={namespace}")
    return Client(f"http://{service['spec']['clusterIP']}:{service['spec']['ports'][0]['port']}", model)


def decision(kubectl: Kubectl, namespace: str, cluster: str, request: str) -> dict[str, Any]:
    """The router's record of a request, asked from within its pod."""
    url = "http://127.0.0.1:8081/v1/kvist/decisions/"
    ask = f"import sys, urllib.request as r; print(r.urlopen('{url}' + sys.argv[1]).read().decode())"
    command = ("exec", f"deployment/{cluster}-router", f"--namespace={namespace}", "--", "python3", "-c", ask)
    found: dict[str, Any] = json.loads(kubectl(*command, request))
    return found
