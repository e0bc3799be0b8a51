"""Keys, certificates and kubeconfigs of one bed, made with openssl."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from testbed.bed import Bed

DAYS = "30"
CURVE = ("ec", "-pkeyopt", "ec_paramgen_curve:P-256")


@dataclass(frozen=True)
class Identity:
    """One certificate: who it is for, and what the API server takes its holder for."""

    name: str
    user: str
    group: str
    hosts: str = ""
    """Its subjectAltName; empty for clients."""


def identities(bed: Bed) -> tuple[Identity, ...]:
    """Everyone in the bed."""
    api = f"IP:127.0.0.1,IP:{bed.address},IP:{bed.api_service},DNS:localhost,DNS:kubernetes"
    return (
        Identity("apiserver", "kube-apiserver", "kvist", f"{api},DNS:kubernetes.default.svc"),
        Identity("admin", "admin", "system:masters"),
        Identity("controller-manager", "system:kube-controller-manager", "kvist"),
        Identity("scheduler", "system:kube-scheduler", "kvist"),
        Identity("node", f"system:node:{bed.node}", "system:nodes", f"DNS:{bed.node},IP:{bed.address}"),
        Identity("kubelet-client", "kube-apiserver-kubelet-client", "system:masters"),
    )


def make_certificates(bed: Bed) -> None:
    """All of them, unless they are there."""
    if (bed.pki / "complete").exists():
        return
    bed.pki.mkdir(mode=0o700, parents=True, exist_ok=True)
    key, cert = bed.pki / "ca.key", bed.pki / "ca.crt"
    openssl("req", "-x509", "-newkey", *CURVE, "-nodes", "-days", DAYS, "-subj", "/CN=kvist-e2e",
            "-keyout", key, "-out", cert)  # fmt: skip
    openssl("genpkey", "-algorithm", *CURVE, "-out", bed.pki / "sa.key")
    openssl("pkey", "-in", bed.pki / "sa.key", "-pubout", "-out", bed.pki / "sa.pub")
    for identity in identities(bed):
        sign(bed, identity)
        if not identity.hosts or identity.name == "node":
            bed.config(identity.name).write_text(kubeconfig(bed, identity.name))
    (bed.pki / "complete").touch()


def sign(bed: Bed, identity: Identity) -> None:
    """One key and its certificate."""
    key, request, cert = (bed.pki / f"{identity.name}.{end}" for end in ("key", "csr", "crt"))
    subject = f"/CN={identity.user}/O={identity.group}"
    openssl("req", "-newkey", *CURVE, "-nodes", "-subj", subject, "-keyout", key, "-out", request)
    extensions = bed.pki / f"{identity.name}.ext"
    extensions.write_text(f"subjectAltName={identity.hosts}\n" if identity.hosts else "")
    openssl("x509", "-req", "-in", request, "-CA", bed.pki / "ca.crt", "-CAkey", bed.pki / "ca.key",
            "-CAcreateserial", "-days", DAYS, "-extfile", extensions, "-out", cert)  # fmt: skip


def openssl(*arguments: str | Path) -> None:
    """One openssl command."""
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


def kubeconfig(bed: Bed, user: str) -> str:
    """A kubeconfig by certificate files."""
    return f"""apiVersion: v1
kind: Config
clusters:
- {{name: kvist-e2e, cluster: {{server: "{bed.server}", certificate-authority: {bed.pki}/ca.crt}}}}
users:
- {{name: {user}, user: {{client-certificate: {bed.pki}/{user}.crt, client-key: {bed.pki}/{user}.key}}}}
contexts:
- {{name: {user}, context: {{cluster: kvist-e2e, user: {user}}}}}
current-context: {user}
"""
