"""Router pods one by one: clients of each, its metrics, its processes, and streams that last."""

from __future__ import annotations

import json
import threading
import urllib.request
from dataclasses import dataclass, replace
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from testbed.client import Client
from testbed.kube import Kubectl

# Ends a process of the router by its role, and prints how many it found.
KILL = """
import os, pathlib, signal, sys
found = [int(path.parent.name) for path in pathlib.Path("/proc").glob("[0-9]*/cmdline")
         if f"kvist_router.processes\\0{sys.argv[1]}\\0".encode() in path.read_bytes()]
for pid in found:
    os.kill(pid, signal.SIGKILL)
print(len(found))
"""


def port(router: dict[str, Any], name: str = "router") -> int:
    """A port of a router pod by its name."""
    (container,) = router["spec"]["containers"]
    return int(next(entry["containerPort"] for entry in container["ports"] if entry["name"] == name))


def straight(client: Client, router: dict[str, Any]) -> Client:
    """The same client of one router pod."""
    return replace(client, base=f"http://{router['status']['podIP']}:{port(router)}")


def sample(client: Client, name: str, **labels: str) -> float:
    """One value of the router's metrics; 0 when it has none of these labels."""
    with urllib.request.urlopen(f"{client.base}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    return sum(
        found.value
        for family in text_string_to_metric_families(text)
        for found in family.samples
        if found.name == name and found.labels == labels
    )


def kill_process(kubectl: Kubectl, router: dict[str, Any], role: str) -> int:
    """SIGKILL to the router's processes of a role; how many there were."""
    where = (router["metadata"]["name"], f"--namespace={router['metadata']['namespace']}")
    return int(kubectl("exec", *where, "--", "python3", "-c", KILL, role))


@dataclass(frozen=True)
class Streamed:
    """An answer that came in pieces; `whole` when it came to its end, which says how many tokens it has."""

    text: str
    tokens: int
    whole: bool


def stream(client: Client, prompt: str, tokens: int, begun: threading.Event, seconds: float) -> Streamed:
    """A greedy completion of so many tokens; `begun` is set at its first piece."""
    usage = {"include_usage": True}
    request = client.completion(prompt, tokens, stream=True, stream_options=usage, ignore_eos=True)
    text, made = "", 0
    with urllib.request.urlopen(request, timeout=seconds) as answer:
        for line in answer:
            said = line.decode().removeprefix("data: ").strip()
            if said == "[DONE]":
                return Streamed(text, made, True)
            if said:
                event = json.loads(said)
                text += "".join(choice["text"] for choice in event["choices"])
                made = (event.get("usage") or {}).get("completion_tokens", made)
                begun.set()
    return Streamed(text, made, False)
