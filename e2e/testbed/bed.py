"""Where the test bed lives: its folder, its addresses, its names. Nothing here acts."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


class BedError(Exception):
    """The test bed cannot do what was asked; the message says why and what to do."""


@dataclass(frozen=True)
class Bed:
    """One test bed. A machine runs one at a time: addresses and the link's name are fixed."""

    state: Path
    """Everything it writes; removed by `down`."""
    node: str = "node1"
    link: str = "kvist-e2e"
    """The machine's end of the veth pair into the bed's network namespace."""
    machine: str = "172.30.0.2"
    """The machine's address on that link: tests reach Services and pods from there."""
    address: str = "172.30.0.1"
    """The node's address: API server and kubelet."""
    prefix: int = 24
    services: str = "10.96.0.0/16"
    api_service: str = "10.96.0.1"
    dns_service: str = "10.96.0.10"
    pods: str = "10.244.0.0/24"

    @property
    def server(self) -> str:
        """The API server, from the machine and from pods alike."""
        return f"https://{self.address}:6443"

    @property
    def kubeconfig(self) -> Path:
        """The administrator's."""
        return self.config("admin")

    @property
    def containerd(self) -> Path:
        """containerd's socket."""
        return self.state / "containerd.sock"

    @property
    def containers(self) -> Path:
        """One folder a container, named like its cgroup. It outlives the containers' processes."""
        return self.state / "run" / "io.containerd.runtime.v2.task" / "k8s.io"

    @property
    def log(self) -> Path:
        """One file a program, and audit.log: what service accounts asked of the API server."""
        return self.state / "log"

    @property
    def pki(self) -> Path:
        """Keys and certificates."""
        return self.state / "pki"

    def config(self, user: str) -> Path:
        """The kubeconfig of a user that certificates.py made."""
        return self.state / f"{user}.kubeconfig"


def bed() -> Bed:
    """The bed of this machine: $KVIST_E2E_STATE, or kvist/e2e in root's state folder."""
    chosen = os.environ.get("KVIST_E2E_STATE")
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Bed((Path(chosen) if chosen else Path(base) / "kvist" / "e2e").absolute())
