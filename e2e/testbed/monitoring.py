"""The kinds of the Prometheus operator, from its own Go module. Only the kinds: nothing here acts on them."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from testbed.bed import BedError
from testbed.kube import Kubectl
from testbed.programs import Catalogue

SOURCE = "prometheus-operator"
KINDS = ("podmonitors", "servicemonitors", "prometheusrules")


def definitions(known: Catalogue) -> list[Path]:
    """Their CustomResourceDefinitions, at the version of versions.toml and with the content of go.sum."""
    source = known.sources[SOURCE]
    done = subprocess.run(
        ["go", "mod", "download", "-json", source.module],
        cwd=source.folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if done.returncode:
        raise BedError(f"{source.module} {source.version}: {done.stderr.strip() or done.stdout.strip()}")
    folder = Path(json.loads(done.stdout)["Dir"]) / "example" / "prometheus-operator-crd"
    return [folder / f"monitoring.coreos.com_{kind}.yaml" for kind in KINDS]


@contextmanager
def monitoring_kinds(kubectl: Kubectl) -> Iterator[None]:
    """Installed now, removed in the end with every object of theirs."""
    files = [f"--filename={path}" for path in definitions(kubectl.catalogue)]
    names = [f"crd/{kind}.monitoring.coreos.com" for kind in KINDS]
    try:
        # On the server's side: the annotation that `apply` leaves has no room for so much.
        kubectl("apply", "--server-side", *files)
        kubectl("wait", *names, "--for=condition=Established", "--timeout=30s")
        yield
    finally:
        kubectl("delete", *names, "--ignore-not-found", "--timeout=60s", seconds=70)
