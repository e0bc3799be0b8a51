"""Everything that a cache can be told, at once: a disk on a claim, an external Redis that speaks TLS alone,
an object store, peers under TLS, compression and encryption, and egress that is limited to what is needed.

One cluster of two engines for all tests of this file: engines take a minute to start. Prompts are computed by
one engine, and each only once, so what another one or a later one reuses came from a tier.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvist_connector.tiers.header import HEADER_BYTES, Header, unpack_header
from testbed.backends import Backends, certificate, certificate_files, remote, secret, start
from testbed.host_folders import HostFolder, Object
from testbed.inside import Replica
from testbed.kube import Kubectl
from testbed.load import prompts
from testbed.release import Helm, refusals, released
from testbed.scenario import cache_cluster
from testbed.small_pods import apply
from testbed.tenancy import Served, machine_tenant, served
from testbed.waiting import LONG_PAUSE, until

pytestmark = [pytest.mark.e2e_pod, pytest.mark.full, pytest.mark.timeout(1500)]
NAME = "demo"
KEY = "summer"
# Of one prompt: what two chunks hold.
REUSED = 512


@dataclass(frozen=True)
class Town:
    """A cluster, what it stores in, and the folders behind its claims."""

    cluster: Served
    backends: Backends
    disks: tuple[Path, ...]

    def replica(self, ordinal: int) -> Replica:
        """One engine with its agent."""
        return Replica(self.cluster.kubectl, self.cluster.namespace, f"{NAME}-engine-{ordinal}")


def manifest(namespace: str) -> Object:
    claim = {"storageClassName": "", "resources": {"requests": {"storage": "512Mi"}}}
    made = cache_cluster(
        NAME,
        replicas=2,
        disk={"size": "256Mi", "volumeClaimTemplate": claim},
        remote=remote(namespace),
        compression={"codec": "zstd"},
        encryption={"keys": {"name": "encryption", "key": "keys"}},
        peers={"enabled": True},
        lookupDeadline="30s",
    )
    backends = [{"podSelector": {"matchLabels": {"app": name}}} for name in ("redis", "s3")]
    made["spec"]["security"] = {
        "agentTls": certificate_files("agents"),
        "networkPolicy": {"egress": True, "egressTo": backends},
    }
    return made


@contextmanager
def disks(kubectl: Kubectl, namespace: str, folder: Path) -> Iterator[tuple[Path, ...]]:
    """Volumes for the claims that the engines will make."""
    made = [HostFolder(f"disk-{NAME}-engine-{ordinal}", folder / f"disk-{ordinal}") for ordinal in (0, 1)]
    for disk in made:
        disk.path.mkdir()
        disk.path.chmod(0o777)
    apply(kubectl, namespace, *(disk.volume(namespace, "ReadWriteOnce") for disk in made))
    yield tuple(disk.path for disk in made)


@pytest.fixture(scope="module")
def town(kubectl: Kubectl, crd: str, node: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Town]:
    keys = f"{KEY} {base64.b64encode(bytes(range(32))).decode()}\n"
    folder = tmp_path_factory.mktemp("town")
    with (
        machine_tenant(kubectl) as namespace,
        disks(kubectl, namespace, folder) as places,
        released(Helm(kubectl), namespace),
    ):
        backends = start(kubectl, namespace)
        agents = certificate(kubectl, f"agents-{namespace}", "kvist-agent")
        apply(kubectl, namespace, secret("encryption", keys=keys), secret("agents", **agents))
        with served(kubectl, namespace, manifest(namespace), folder) as cluster:
            cluster.settled(1200)
            yield Town(cluster, backends, places)
            assert refusals(kubectl, namespace) == []


def nothing(_: Town) -> None:
    """The memory of the engine that computed is there to be read."""


def without_memory(town: Town) -> None:
    """What was computed lies in tiers below."""
    town.replica(0).clear("memory")


def without_redis(town: Town) -> None:
    """The object store alone has it, but for the disk of the engine that computed."""
    without_memory(town)
    town.backends.redis.flushall()


@pytest.mark.parametrize(
    ("tier", "subject", "lose"),
    [("peer", "oak", nothing), ("redis", "birch", without_memory), ("object", "willow", without_redis)],
)
def test_one_engine_reads_what_the_other_has_computed(
    town: Town, tier: str, subject: str, lose: Callable[[Town], None]
) -> None:
    (prompt,) = prompts([subject])
    first, second = town.replica(0), town.replica(1)
    computed = first.complete(prompt)
    first.flush()
    lose(town)
    before = second.hit_tokens(tier)
    assert second.complete(prompt) == computed
    reused(second, tier, before)
    # Whoever asks the router gets the same.
    assert town.cluster.client().complete(prompt).text == computed


def reused(replica: Replica, tier: str, before: int) -> None:
    """Wait until the engine has reported that it took a prompt's chunks from that tier."""

    def enough() -> bool:
        return replica.hit_tokens(tier) - before >= REUSED

    until(f"{REUSED} tokens from {tier}", enough, 30, lambda: str(replica.stats()), LONG_PAUSE)


def test_a_claim_outlives_its_pod(kubectl: Kubectl, town: Town) -> None:
    (prompt,) = prompts(["maple"])
    computed = town.replica(1).complete(prompt)
    town.replica(1).flush()
    before, claims = town.cluster.engine(1)["metadata"]["uid"], claimed(town)
    kubectl("delete", f"pod/{NAME}-engine-1", f"--namespace={town.cluster.namespace}", seconds=180)
    town.cluster.pods.ready(f"{NAME}-engine-1", before, 900)
    assert claimed(town) == claims
    # The engine's and the agent's memory are new, and the disk is asked before everything that is shared.
    assert town.replica(1).complete(prompt) == computed
    reused(town.replica(1), "disk", 0)
    town.cluster.settled()


def test_nothing_lies_in_plain_below_memory(town: Town) -> None:
    town.replica(0).complete(prompts(["alder"])[0])
    town.replica(0).flush()
    on_disk = [path.read_bytes() for disk in town.disks for path in disk.rglob("*.kvist")]
    for stored in (on_disk, list(town.backends.in_redis()), list(town.backends.in_bucket())):
        headers = list(heads(stored))
        assert len(headers) >= 2
        assert {header.key_id for header in headers} == {KEY}
        assert all(header.codec and header.stored_bytes < 0.9 * header.raw_bytes for header in headers)


def heads(stored: Iterable[bytes]) -> Iterator[Header]:
    """Of whole chunks: the disk keeps notes of its own in files of the same kind."""
    for value in stored:
        if len(value) > HEADER_BYTES:
            yield unpack_header(value[:HEADER_BYTES])


def test_claims_go_with_the_cluster(kubectl: Kubectl, town: Town) -> None:
    where = f"--namespace={town.cluster.namespace}"
    kubectl("delete", f"cc/{NAME}", where, "--timeout=60s", seconds=70)
    until("no claims", lambda: not claimed(town), 180, lambda: str(claimed(town)), LONG_PAUSE)
    # What is shared is the next cluster's.
    assert list(town.backends.in_bucket())


def claimed(town: Town) -> dict[str, Any]:
    """The engines' claims, by name."""
    found = town.cluster.kubectl.listed("pvc", f"--namespace={town.cluster.namespace}")
    uids = {item["metadata"]["name"]: item["metadata"]["uid"] for item in found}
    return {name: uid for name, uid in uids.items() if name.startswith("disk-")}
