"""The node: containerd, kubelet, kube-proxy, kube-router's firewall, CoreDNS."""

from __future__ import annotations

import json
from pathlib import Path

from testbed.bed import Bed
from testbed.control_plane import start_scheduler
from testbed.images import ImageStore, coredns_image, pause_image
from testbed.kube import Kubectl, answers
from testbed.remains import parents
from testbed.running import Runner

TEMPLATES = Path(__file__).resolve().parent / "templates"
# Processor time on a busy machine: all pods weigh as so many processes.
ONE_PROCESS, PODS_WEIGH = 1024, 10


def start_node(runner: Runner) -> None:
    """Everything pods need. Returns when the node is Ready and names resolve."""
    bed, kubectl = runner.bed, Kubectl(runner.bed, runner.catalogue)
    start_scheduler(runner)
    start_containerd(runner)
    start_kubelet(runner, kubectl)
    runner.start(
        "kube-proxy",
        f"--config={filled(bed, 'kube-proxy.yaml')}",
        ready=lambda: True,
    )
    runner.start(
        "kube-router",
        "--run-firewall=true",
        "--run-service-proxy=false",
        "--run-router=false",
        "--run-loadbalancer=false",
        f"--kubeconfig={bed.kubeconfig}",
        f"--hostname-override={bed.node}",
        f"--service-cluster-ip-range={bed.services}",
        ready=lambda: True,
    )
    kubectl("apply", "--server-side", f"--filename={filled(bed, 'coredns.yaml')}")
    kubectl("wait", "pod/coredns", "--namespace=kube-system", "--for=condition=Ready", "--timeout=120s",
            seconds=130)  # fmt: skip
    weigh_pods()


def weigh_pods() -> None:
    """Under cgroups of version 1 all pods together would get what one other process of the machine gets."""
    for group in parents():
        if (shares := group / "cpu.shares").exists():
            shares.write_text(str(PODS_WEIGH * ONE_PROCESS))


def start_containerd(runner: Runner) -> None:
    """containerd with the images every pod needs."""
    bed, catalogue = runner.bed, runner.catalogue
    cni = bed.state / "cni"
    cni.mkdir(exist_ok=True)
    (cni / "10-bridge.conflist").write_text(json.dumps(cni_config(bed)))
    shim = str(catalogue.path("containerd-shim-runc-v2"))
    config = filled(bed, "containerd.toml", SHIM=shim)
    runner.start("containerd", f"--config={config}", ready=bed.containerd.is_socket)
    store = ImageStore(bed, catalogue)
    store.bring(pause_image(catalogue))
    store.bring(coredns_image(catalogue))


def start_kubelet(runner: Runner, kubectl: Kubectl) -> None:
    """kubelet, until its node is Ready."""
    bed = runner.bed
    # Pods resolve names through CoreDNS only; there is no network beyond the bed.
    (bed.state / "resolv.conf").write_text(f"nameserver {bed.dns_service}\n")
    runner.start(
        "kubelet",
        f"--config={filled(bed, 'kubelet.yaml')}",
        f"--kubeconfig={bed.config('node')}",
        f"--hostname-override={bed.node}",
        f"--node-ip={bed.address}",
        f"--root-dir={bed.state}/kubelet",
        ready=lambda: answers(bed, f"/api/v1/nodes/{bed.node}"),
        seconds=120,
    )
    kubectl("wait", f"node/{bed.node}", "--for=condition=Ready", "--timeout=120s", seconds=130)


def cni_config(bed: Bed) -> dict[str, object]:
    """One bridge for all pods."""
    ranges = [[{"subnet": bed.pods}]]
    bridge = {
        "type": "bridge",
        "bridge": "cni0",
        "isGateway": True,
        "ipMasq": False,
        "hairpinMode": True,
        "ipam": {"type": "host-local", "ranges": ranges, "routes": [{"dst": "0.0.0.0/0"}]},
    }
    portmap = {"type": "portmap", "capabilities": {"portMappings": True}}
    return {"cniVersion": "1.0.0", "name": "kvist-e2e", "plugins": [bridge, portmap]}


def filled(bed: Bed, name: str, **more: str) -> Path:
    """A template of this folder with the bed's values, written into its state."""
    values = {"STATE": str(bed.state), "NODE": bed.node, "PODS": bed.pods, "DNS": bed.dns_service, **more}
    text = (TEMPLATES / name).read_text()
    for key, value in values.items():
        text = text.replace(f"@{key}@", value)
    target = bed.state / name
    # kube-proxy ends when its file is written, even with what it held: `up` of a bed that is up ended it.
    if not target.exists() or target.read_text() != text:
        target.write_text(text)
    return target
