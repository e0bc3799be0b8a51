"""The operator of an installed release as a process of the machine, with the release's settings and rights.

For the tests without pods: what its Deployment would run, as its service account.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from testbed.kube import Kubectl
from testbed.operator_process import OperatorProcess, operator
from testbed.release import ACCOUNT


@contextmanager
def installed_operator(
    kubectl: Kubectl, namespace: str, folder: Path, identity: str, *more: str, packages: Path | None = None
) -> Iterator[OperatorProcess]:
    """Until the end of the context. `packages`: Python packages to run instead of the checkout's."""
    settings = kubectl.get(f"configmap/{ACCOUNT}", f"--namespace={namespace}")["data"]["operator.yaml"]
    config, kubeconfig = folder / f"{identity}.yaml", folder / f"{identity}.kubeconfig"
    config.write_text(settings)
    token = kubectl("create", "token", ACCOUNT, f"--namespace={namespace}").strip()
    kubeconfig.write_text(json.dumps(account(kubectl, token)))
    environment = {"KUBECONFIG": str(kubeconfig)} | ({"PYTHONPATH": str(packages)} if packages else {})
    flags = (f"--config={config}", *more)
    with operator(kubectl, namespace, folder, identity, *flags, environment=environment) as process:
        yield process


def account(kubectl: Kubectl, token: str) -> dict[str, object]:
    """A kubeconfig with nothing but a token."""
    authority = base64.b64encode((kubectl.bed.pki / "ca.crt").read_bytes()).decode()
    cluster = {"server": kubectl.bed.server, "certificate-authority-data": authority}
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "bed",
        "clusters": [{"name": "bed", "cluster": cluster}],
        "users": [{"name": "account", "user": {"token": token}}],
        "contexts": [{"name": "bed", "context": {"cluster": "bed", "user": "account"}}],
    }
