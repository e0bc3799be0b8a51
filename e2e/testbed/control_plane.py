"""etcd, API server, controller manager and, with a node, the scheduler."""

from __future__ import annotations

from testbed.bed import Bed
from testbed.certificates import make_certificates
from testbed.kube import answers
from testbed.namespaces import inside
from testbed.running import Runner

ETCD = "http://127.0.0.1:2379"
# What service accounts ask: the tests of the operator's role and of its idle silence read it.
AUDIT = """apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- {level: None, userGroups: ["system:serviceaccounts:kube-system"]}
- {level: Metadata, userGroups: ["system:serviceaccounts"]}
- {level: None}
"""


def start_control_plane(runner: Runner) -> None:
    """Everything a test without pods needs."""
    bed = runner.bed
    make_certificates(bed)
    (bed.state / "audit.yaml").write_text(AUDIT)
    start_etcd(runner)
    runner.start("kube-apiserver", *api_server(bed), ready=lambda: answers(bed, "/readyz"), seconds=120)
    runner.start(
        "kube-controller-manager",
        f"--kubeconfig={bed.config('controller-manager')}",
        f"--service-account-private-key-file={bed.pki}/sa.key",
        f"--root-ca-file={bed.pki}/ca.crt",
        "--use-service-account-credentials",
        f"--cluster-cidr={bed.pods}",
        "--leader-elect=false",
        # The account of a namespace is the last thing a new namespace needs before pods can use it.
        ready=lambda: answers(bed, "/api/v1/namespaces/default/serviceaccounts/default"),
        seconds=120,
    )


def start_scheduler(runner: Runner) -> None:
    """The scheduler: its pods need a node."""
    runner.start(
        "kube-scheduler",
        f"--kubeconfig={runner.bed.config('scheduler')}",
        "--leader-elect=false",
        ready=lambda: True,
    )


def start_etcd(runner: Runner) -> None:
    """etcd without fsync: its data lives as long as the bed."""
    peer = ETCD.replace("2379", "2380")
    runner.start(
        "etcd",
        f"--data-dir={runner.bed.state}/etcd",
        f"--listen-client-urls={ETCD}",
        f"--advertise-client-urls={ETCD}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=default={peer}",
        "--unsafe-no-fsync",
        "--log-level=warn",
        ready=lambda: etcd_healthy(runner),
    )


def etcd_healthy(runner: Runner) -> bool:
    """Whether its port is open, asked from inside: it listens nowhere else."""
    port = f":{int(ETCD.rpartition(':')[2]):04X} "
    table = inside(runner.record.first) / str(runner.record.programs["etcd"].pid) / "net" / "tcp"
    return any(port in line and " 0A " in line for line in table.read_text().splitlines())


def api_server(bed: Bed) -> list[str]:
    """The API server's flags."""
    pki = bed.pki
    return [
        f"--etcd-servers={ETCD}",
        "--secure-port=6443",
        "--bind-address=0.0.0.0",
        f"--advertise-address={bed.address}",
        f"--service-cluster-ip-range={bed.services}",
        f"--tls-cert-file={pki}/apiserver.crt",
        f"--tls-private-key-file={pki}/apiserver.key",
        f"--client-ca-file={pki}/ca.crt",
        f"--service-account-key-file={pki}/sa.pub",
        f"--service-account-signing-key-file={pki}/sa.key",
        "--service-account-issuer=https://kubernetes.default.svc",
        "--authorization-mode=Node,RBAC",
        f"--kubelet-client-certificate={pki}/kubelet-client.crt",
        f"--kubelet-client-key={pki}/kubelet-client.key",
        f"--kubelet-certificate-authority={pki}/ca.crt",
        # The node's name is in no DNS.
        "--kubelet-preferred-address-types=InternalIP",
        "--allow-privileged=true",
        "--profiling=false",
        f"--audit-policy-file={bed.state}/audit.yaml",
        f"--audit-log-path={bed.log}/audit.log",
    ]
