"""What every test against the test bed gets: the bed, kubectl, the CRD, a namespace of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from testbed.bed import Bed, bed
from testbed.kube import Kubectl, answers
from testbed.programs import CHECKOUT, catalogue
from testbed.tenancy import machine_tenant, tenant

CRD = CHECKOUT / "crds" / "cachecluster.yaml"


@pytest.fixture(scope="session")
def here() -> Bed:
    """The running bed; the tests do not start it."""
    found = bed()
    if not found.kubeconfig.exists() or not answers(found, "/readyz"):
        pytest.fail(
            "no API server answers: run `make e2e-up` (or `e2e/cluster api-only`) first", pytrace=False
        )
    return found


@pytest.fixture(scope="session")
def kubectl(here: Bed) -> Kubectl:
    """kubectl as the administrator."""
    return Kubectl(here, catalogue())


@pytest.fixture(scope="session")
def crd(kubectl: Kubectl) -> str:
    """The name of the CRD of this checkout, established."""
    kubectl("apply", "--server-side", "--force-conflicts", f"--filename={CRD}")
    name = "cacheclusters.kvist.dev"
    kubectl("wait", f"crd/{name}", "--for=condition=Established", "--timeout=30s")
    return name


@pytest.fixture
def namespace(kubectl: Kubectl) -> Iterator[str]:
    """A namespace that enforces the `restricted` Pod Security Standard."""
    with tenant(kubectl) as name:
        yield name


@pytest.fixture(scope="session")
def node(kubectl: Kubectl, here: Bed) -> str:
    """The node's name; fails where only the API server runs."""
    found = kubectl.get("node", here.node)
    if found is None:
        pytest.fail("there is no node: run `make e2e-up` first", pytrace=False)
    return here.node


@pytest.fixture
def machine_folders(kubectl: Kubectl) -> Iterator[str]:
    """Such a namespace with claims on the checkout, its Python and a model."""
    with machine_tenant(kubectl) as name:
        yield name
