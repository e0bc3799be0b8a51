"""Operators as processes of the machine, for the tests without pods."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from testbed.bed import BedError
from testbed.kube import Kubectl
from testbed.programs import CHECKOUT
from testbed.waiting import until

IMAGES = {
    "engine": "kvist.dev/engine:e2e",
    "router": "kvist.dev/router:e2e",
    "redis": "kvist.dev/redis:e2e",
    "pull-policy": "Never",
}


@dataclass(frozen=True)
class OperatorProcess:
    """A running operator."""

    identity: str
    process: subprocess.Popen[bytes]
    log: Path

    def kill(self) -> None:
        """End it without a chance to give up its Lease."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)


def leader(kubectl: Kubectl, namespace: str) -> str:
    """Who holds the Lease; empty when nobody does."""
    lease = kubectl.get("lease/kvist-operator", f"--namespace={namespace}")
    return (lease or {}).get("spec", {}).get("holderIdentity") or ""


@contextmanager
def operator(
    kubectl: Kubectl,
    namespace: str,
    folder: Path,
    identity: str,
    *more: str,
    environment: Mapping[str, str] | None = None,
) -> Iterator[OperatorProcess]:
    """An operator that serves `namespace`, where its Lease is too. It runs until the end of the context."""
    log = folder / f"{identity}.log"
    flags = [f"--namespace={namespace}", f"--watch-namespaces=[{namespace}]", f"--identity={identity}"]
    flags += ["--host=127.0.0.1", "--port=0", *(f"--images.{name}={value}" for name, value in IMAGES.items())]
    flags += more
    with log.open("wb") as output:
        process = subprocess.Popen(
            [CHECKOUT / ".venv" / "bin" / "python", "-m", "kvist_operator", *flags],
            env={**os.environ, "KUBECONFIG": str(kubectl.bed.kubeconfig), **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    running = OperatorProcess(identity, process, log)
    try:
        until(f"operator {identity}", lambda: started(running), 60, lambda: log.read_text()[-2000:])
        yield running
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                running.kill()


def started(running: OperatorProcess) -> bool:
    """Whether it serves its health checks; BedError when it has ended."""
    said = running.log.read_text()
    if running.process.poll() is not None:
        raise BedError(f"operator {running.identity} ended: {said[-2000:]}")
    return "health checks and metrics on port" in said
