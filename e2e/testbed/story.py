"""What the conditions of a CacheCluster said over time: every version of its status, from a watch."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testbed.kube import Kubectl
from testbed.waiting import LONG_PAUSE, until


@dataclass(frozen=True)
class Story:
    """`log` is filled by a running `kubectl get --watch`."""

    kubectl: Kubectl
    namespace: str
    name: str
    log: Path

    def versions(self) -> list[dict[str, Any]]:
        """Of the object, oldest first."""
        text, decoder = self.log.read_text(), json.JSONDecoder()
        found, at = [], 0
        while (at := _skip(text, at)) < len(text):
            try:
                version, at = decoder.raw_decode(text, at)
            except ValueError:
                break  # the latest one is still being written
            found.append(version)
        return found

    def mark(self) -> int:
        """Now, for `said` and `saw`."""
        return len(self.versions())

    def said(self, condition: str, since: int = 0) -> list[tuple[str, str]]:
        """Status and reason of a condition, each time they changed after `since`."""
        versions = [conditions(version).get(condition) for version in self.versions()]
        pairs = [(entry["status"], entry["reason"]) if entry else None for entry in versions]
        before = [None, *pairs]
        return [
            pair for was, pair in zip(before[since:], pairs[since:], strict=False) if pair and pair != was
        ]

    def now(self, condition: str) -> dict[str, Any]:
        """A condition as it is, if it is about the current generation."""
        latest = self.kubectl.get(f"cc/{self.name}", f"--namespace={self.namespace}")
        entry = conditions(latest).get(condition, {})
        current = entry.get("observedGeneration") == latest["metadata"]["generation"]
        return entry if current else {}

    def wait(self, condition: str, status: str, seconds: float = 300) -> dict[str, Any]:
        """Until the condition has that status for the current generation."""
        until(
            f"{condition}={status}",
            lambda: self.now(condition).get("status") == status,
            seconds,
            self.told,
            LONG_PAUSE,
        )
        return self.now(condition)

    def saw(self, condition: str, status: str, since: int, seconds: float = 60) -> str:
        """The first reason of that status after `since`; waits for it."""

        def reasons() -> list[str]:
            return [reason for found, reason in self.said(condition, since) if found == status]

        until(f"{condition}={status} in the story", lambda: bool(reasons()), seconds, self.told)
        return reasons()[0]

    def told(self) -> str:
        """All changes of all conditions, and the events, for messages."""
        kinds = sorted({kind for version in self.versions() for kind in conditions(version)})
        lines = [f"{kind}: {self.said(kind)}" for kind in kinds]
        return "\n".join([*lines, *self.events()])

    def events(self) -> list[str]:
        """Reason and message of the events on the object."""
        selector = f"--field-selector=involvedObject.kind=CacheCluster,involvedObject.name={self.name}"
        found = self.kubectl.listed("events", f"--namespace={self.namespace}", selector)
        return [f"{item['reason']}: {item['message']}" for item in found]


def conditions(version: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """By type."""
    return {item["type"]: item for item in version.get("status", {}).get("conditions", [])}


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at


@contextmanager
def story(kubectl: Kubectl, namespace: str, name: str, folder: Path) -> Iterator[Story]:
    """Watch from now on until the end of the context."""
    log = folder / f"{namespace}-{name}.json"
    program = str(kubectl.catalogue.path("kubectl"))
    command = [program, f"--kubeconfig={kubectl.bed.kubeconfig}", "get", f"cc/{name}"]
    with log.open("wb") as output:
        watch = subprocess.Popen(
            [*command, f"--namespace={namespace}", "--watch", "--output=json"], stdout=output
        )
    told = Story(kubectl, namespace, name, log)
    try:
        until("the watch", lambda: bool(told.versions()), 30)
        yield told
    finally:
        watch.terminate()
        watch.wait(10)
