"""The source that the settings ask for. Called by app.py."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from random import Random

import aiohttp

from kvist_connector.errors import ConfigError
from kvist_router.discovery.file import FileSource
from kvist_router.discovery.kubernetes import KubernetesSource
from kvist_router.discovery.kubernetes_api import Access, KubernetesApi
from kvist_router.discovery.source import Source
from kvist_router.discovery.static import StaticSource
from kvist_router.settings import SERVICE_ACCOUNT, KubernetesSettings, RouterSettings


def source(
    settings: RouterSettings, session: aiohttp.ClientSession, environment: Mapping[str, str]
) -> Source:
    """Raises ConfigError where a pod's own facts are needed, and this is none."""
    if settings.kubernetes.service:
        scheme = "https" if settings.agent.tls.used else "http"
        return _kubernetes(settings.kubernetes, session, environment, scheme)
    if settings.replicas_file is not None:
        return FileSource(settings.replicas_file, settings.replicas)
    return StaticSource(settings.replicas)


def _kubernetes(
    settings: KubernetesSettings,
    session: aiohttp.ClientSession,
    environment: Mapping[str, str],
    agent_scheme: str,
) -> KubernetesSource:
    access = Access(settings.server or _own_server(environment), settings.token_file, settings.ca_file)
    namespace = settings.namespace or _own_namespace()
    api = KubernetesApi(session, access)
    return KubernetesSource(api, namespace, settings.service, Random(), agent_scheme=agent_scheme)


def _own_server(environment: Mapping[str, str]) -> str:
    host, port = environment.get("KUBERNETES_SERVICE_HOST"), environment.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise ConfigError(
            "kubernetes.server: not given, and KUBERNETES_SERVICE_HOST is not set: "
            "outside of a pod give the API server's URL"
        )
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


def _own_namespace() -> str:
    path = Path(SERVICE_ACCOUNT, "namespace")
    try:
        return path.read_text().strip()
    except OSError as error:
        raise ConfigError(
            f"kubernetes.namespace: not given, and {path} cannot be read: give the Service's namespace"
        ) from error
