"""Asking the API server, as the administrator: readiness without a program, everything else with kubectl."""

from __future__ import annotations

import json
import ssl
import subprocess
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

from testbed.bed import Bed, BedError
from testbed.programs import Catalogue


def answers(bed: Bed, path: str) -> bool:
    """Whether the API server answers a GET of `path` with 200."""
    context = ssl.create_default_context(cafile=str(bed.pki / "ca.crt"))
    context.load_cert_chain(bed.pki / "admin.crt", bed.pki / "admin.key")
    try:
        with urllib.request.urlopen(f"{bed.server}{path}", context=context, timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


@dataclass(frozen=True)
class Kubectl:
    """kubectl of this bed."""

    bed: Bed
    catalogue: Catalogue

    def __call__(self, *arguments: str, stdin: str | None = None, seconds: float = 60) -> str:
        """Its output. BedError with its message."""
        command = [str(self.catalogue.path("kubectl")), f"--kubeconfig={self.bed.kubeconfig}", *arguments]
        done = subprocess.run(
            command, input=stdin, capture_output=True, text=True, timeout=seconds, check=False
        )
        if done.returncode:
            raise BedError(f"kubectl {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout

    def get(self, *arguments: str) -> Any:
        """What `kubectl get` finds, or None when there is no such object."""
        found = self("get", "--output=json", "--ignore-not-found", *arguments)
        return json.loads(found) if found.strip() else None

    def listed(self, *arguments: str) -> list[dict[str, Any]]:
        """The objects of a `kubectl get` that names kinds, perhaps none."""
        found: list[dict[str, Any]] = (self.get(*arguments) or {"items": []})["items"]
        return found
