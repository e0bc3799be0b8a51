"""TLS between routers, agents and peers: files of the user's Secrets, and what each program is told. Pure.

Called by plan.py; the renderer knows the files' paths.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kvist_operator.spec import CacheCluster
from kvist_operator.spec.base import SecretRef

CERTIFICATE: Final = "tls.crt"
PRIVATE_KEY: Final = "tls.key"
AUTHORITY: Final = "ca.crt"
_SETTINGS: Final = {"certificate_file": CERTIFICATE, "key_file": PRIVATE_KEY, "ca_file": AUTHORITY}


def agent_tls_files(cluster: CacheCluster) -> Mapping[str, SecretRef]:
    """By name; empty without TLS or without agents."""
    tls = cluster.spec.security.agent_tls
    if tls is None or not cluster.spec.cache.enabled:
        return {}
    return {CERTIFICATE: tls.certificate, PRIVATE_KEY: tls.private_key, AUTHORITY: tls.ca}


def agent_tls_token(file: str) -> str:
    """The name of the file's path among a plan's placeholders."""
    return f"path.agent-tls/{file}"


def agent_tls_arguments(cluster: CacheCluster) -> list[str]:
    """Of the agent. The operator has no certificate, so the token alone will do."""
    if not agent_tls_files(cluster):
        return []
    arguments = ["--tls.clients", "token"]
    for name, path in _paths().items():
        arguments += [f"--tls.{name.replace('_', '-')}", path]
    return arguments


def agent_tls_settings(cluster: CacheCluster) -> dict[str, object]:
    """Of the router's section `agent`."""
    return {"tls": _paths()} if agent_tls_files(cluster) else {}


def _paths() -> dict[str, str]:
    return {name: f"$({agent_tls_token(file)})" for name, file in _SETTINGS.items()}
