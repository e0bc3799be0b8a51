"""One engine, and the agent beside it, asked from within their pod: past the router, and without a token.

An agent takes controls from its own user at a socket of its own.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from kvist_connector.names import PORT_ENGINE
from testbed.kube import Kubectl
from testbed.scenario import SERVED

CONTROL = "/run/kvist/agent.sock.control"
ASK_AGENT = """
import http.client, socket, sys
connection = http.client.HTTPConnection("agent", timeout=60)
connection.sock = socket.socket(socket.AF_UNIX)
connection.sock.connect(sys.argv[1])
connection.request(sys.argv[2], sys.argv[3], sys.argv[4] or None, {"content-type": "application/json"})
answer = connection.getresponse()
text = answer.read().decode()
sys.exit(text) if answer.status != 200 else print(text)
"""
ASK_ENGINE = """
import sys, urllib.request as r
url, kind = f"http://127.0.0.1:{sys.argv[1]}/v1/completions", {"content-type": "application/json"}
print(r.urlopen(r.Request(url, sys.argv[2].encode(), kind), timeout=300).read().decode())
"""


@dataclass(frozen=True)
class Replica:
    """A pod with an engine and its agent."""

    kubectl: Kubectl
    namespace: str
    pod: str

    def complete(self, prompt: str, tokens: int = 8) -> str:
        """The text of a greedy completion."""
        body = {"model": SERVED, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
        said = self._exec("engine", ASK_ENGINE, str(PORT_ENGINE), json.dumps(body), seconds=320)
        return str(said["choices"][0]["text"])

    def stats(self) -> dict[str, Any]:
        """Of the agent."""
        return self._agent("GET", "/v1/kvist/stats")

    def hit_tokens(self, tier: str) -> int:
        """Prompt tokens that the engine got from a tier since its agent started."""
        return int(self.stats()["hit_tokens"][tier])

    def flush(self, seconds: float = 60) -> None:
        """Wait until everything has been written behind."""
        left = self._agent("POST", "/v1/kvist/flush", {"deadline": seconds})
        assert left == {"pending_chunks": 0, "pending_bytes": 0}, left

    def clear(self, tier: str) -> None:
        """Remove all chunks from a tier."""
        self._agent("POST", "/v1/kvist/clear", {"tier": tier})

    def _agent(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        return self._exec("agent", ASK_AGENT, CONTROL, method, path, json.dumps(body) if body else "")

    def _exec(self, container: str, program: str, *words: str, seconds: float = 90) -> dict[str, Any]:
        where = (self.pod, f"--namespace={self.namespace}", f"--container={container}")
        found: dict[str, Any] = json.loads(
            self.kubectl("exec", *where, "--", "python3", "-c", program, *words, seconds=seconds)
        )
        return found
