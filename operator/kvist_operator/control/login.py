"""Who the operator is at the API server: its service account in a pod, the kubeconfig elsewhere.

Called by rest.py and, through a login handler, by kopf; both read it again, since a token in a file rotates.
"""

from __future__ import annotations

import dataclasses
import os

import kopf
import yaml

from kvist_connector.errors import ConfigError


def login() -> kopf.ConnectionInfo:
    """Address and credentials as of now; raises ConfigError that says what is missing."""
    settings = kopf.OperatorSettings()
    try:
        found = kopf.login_with_service_account(settings=settings)
        if found is not None:
            return _by_address(found)
        found = kopf.login_with_kubeconfig(settings=settings)
    except (OSError, KeyError, yaml.YAMLError, kopf.LoginError) as error:
        raise ConfigError(f"KUBECONFIG: cannot be used: {error}") from error
    if found is None or not found.server:
        raise ConfigError(
            "no Kubernetes API server is known: run in a pod with a service account, or set KUBECONFIG"
        )
    return found


def _by_address(found: kopf.ConnectionInfo) -> kopf.ConnectionInfo:
    """The address that every pod is given: works while the cluster's DNS does not."""
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT")
    if not host or not port:
        return found
    return dataclasses.replace(found, server=f"https://{f'[{host}]' if ':' in host else host}:{port}")
