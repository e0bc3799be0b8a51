"""Configuration of the router: one YAML file, environment (`KVIST_ROUTER_`) and flags, the same names.

Called by app.py; everything else gets the frozen object.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from kvist_connector import names
from kvist_connector.settings import Settings
from kvist_connector.tls import MutualTls
from kvist_router.access.settings import (
    MAX_TENANTS,
    AdmissionSettings,
    AuthSettings,
    SeparationSettings,
    TenantSettings,
    check_tenants,
)
from kvist_router.log_settings import LogSettings, TracingSettings
from kvist_router.mind.neighbours.settings import NeighbourSettings
from kvist_router.mind.policies.weights import PolicyWeights
from kvist_router.tls import TlsSettings
from kvist_router.urls import checked_url

# Until every proxy and load balancer has heard that an endpoint goes away.
KUBERNETES_GRACE_SECONDS = 10.0
SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
_LABEL = r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?)?$"  # of a Service or namespace


class ReplicaSettings(Settings):
    """One engine, and its agent if it has one."""

    name: str = Field(
        default="", max_length=128, pattern=r"^[A-Za-z0-9._-]*$", description="label; default: host-port"
    )
    url: str = Field(description="base URL of the engine's OpenAI server")
    agent: str | None = Field(
        default=None, description="base URL of the agent's HTTP API; none: an engine without agent"
    )

    @field_validator("url", "agent")
    @classmethod
    def _check_url(cls, value: str | None) -> str | None:
        return None if value is None else checked_url(value)

    @property
    def label(self) -> str:
        """The name in headers, metrics and records."""
        return self.name or self.url.split("://", 1)[1].replace("/", "-").replace(":", "-")


PolicyName = Literal["kvist", "approximate", "least-load", "prefix-affinity", "round-robin"]


class AgentSettings(Settings):
    """How agents are asked."""

    token_file: Path | None = Field(
        default=None,
        description="file with the agents' bearer token, read at every connection, so that it may change; "
        "none: no token",
    )
    tls: MutualTls = Field(
        default=MutualTls(), description="own certificate for agents, and whose certificates are believed"
    )


class KubernetesSettings(Settings):
    """Discovery by the EndpointSlices of a Service. The defaults are a pod's own."""

    service: str = Field(
        default="",
        max_length=63,
        pattern=_LABEL,
        description="headless Service whose endpoints are the replicas, with ports named engine and agent; "
        "none: no discovery in Kubernetes",
    )
    namespace: str = Field(
        default="", max_length=63, pattern=_LABEL, description="its namespace; default: the pod's own"
    )
    server: str | None = Field(default=None, description="URL of the API server; default: the pod's own")
    token_file: Path | None = Field(
        default=Path(SERVICE_ACCOUNT, "token"),
        description="file with the bearer token, read at every request, since it rotates; none: no token",
    )
    ca_file: Path | None = Field(
        default=Path(SERVICE_ACCOUNT, "ca.crt"),
        description="file with the API server's CA, read at every request; none: the system's",
    )

    @field_validator("server")
    @classmethod
    def _check_url(cls, value: str | None) -> str | None:
        return None if value is None else checked_url(value)


class ModelSettings(Settings):
    """Where tokens come from."""

    path: Path | None = Field(
        default=None,
        description="folder with tokenizer.json, tokenizer_config.json and the chat template; "
        "none: every prompt is tokenized by an engine's /tokenize, which costs a round trip",
    )
    verify_cases: int = Field(
        default=200,
        ge=0,
        le=10_000,
        description="prompts compared with an engine's /tokenize before local tokens count; 0: none",
    )


class LimitSettings(Settings):
    """Bounds and deadlines, one per phase."""

    body_bytes: int = Field(default=128 * 2**20, ge=1024, description="longest request body, bytes")
    body_memory_bytes: int = Field(
        default=16 * 2**20,
        ge=2**16,
        le=48 * 2**20,
        description="longer bodies pass through a file in the folder for temporary files; nothing of strings "
        "over 1 MiB (pictures, sounds) is in memory, bytes",
    )
    bodies_memory_bytes: int = Field(
        default=2**30,
        ge=2**20,
        description="memory for all bodies of a process together; above it requests are answered 503, bytes",
    )
    spool_bytes: int = Field(
        default=8 * 2**30,
        ge=0,
        description="files for all long bodies of a process together; above it they are answered 503, bytes",
    )
    head_bytes: int = Field(default=2**16, ge=1024, description="longest head of a request, bytes")
    head_seconds: float = Field(
        default=10.0, gt=0, description="deadline to receive a request's headers, seconds"
    )
    body_seconds: float = Field(default=30.0, gt=0, description="deadline to receive a request body, seconds")
    decide_seconds: float = Field(default=10.0, gt=0, description="deadline of a decision, seconds")
    connect_seconds: float = Field(default=2.0, gt=0, description="deadline to connect to an engine, seconds")
    first_byte_seconds: float = Field(
        default=600.0, gt=0, description="deadline for the first body byte of an engine, seconds"
    )
    idle_seconds: float = Field(
        default=120.0, gt=0, description="longest pause between two pieces of an answer, seconds"
    )
    grace_seconds: float | None = Field(
        default=None,
        ge=0,
        description="time after SIGTERM in which /readyz says no and requests are still taken, until nobody "
        "sends any more, seconds; default: 10 with discovery in Kubernetes, else 0",
    )
    silent_mind_seconds: float = Field(
        default=3.0,
        gt=0,
        description="how long nothing may come from the mind's process until relays do without it, seconds",
    )
    hung_seconds: float = Field(
        default=15.0,
        gt=0,
        description="how long one of the router's processes may give no answer until it is replaced, seconds",
    )
    drain_seconds: float = Field(
        default=120.0, ge=0, description="time that running answers have after that, seconds"
    )
    queue_seconds: float = Field(
        default=0.0,
        ge=0,
        description="how long a request waits for a replica when none can take it, seconds; 0: it is refused",
    )
    connections: int = Field(default=4096, ge=1, description="most connections to all engines together")
    in_flight: int = Field(
        default=8192, ge=1, description="most requests at once; above it requests are answered 503"
    )
    retry_ratio: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="most retries per request over time, so that a fault cannot double the load",
    )
    continuations: int = Field(
        default=0,
        ge=0,
        le=8,
        description="how often a streamed answer whose engine dies goes on at another replica, where that is "
        "exact (router.md); 0: never, the stream ends with an error",
    )


class TokenSettings(Settings):
    """Caches and deadlines of tokenization."""

    cache_bytes: int = Field(default=64 * 2**20, ge=0, description="segment cache, bytes")
    key_cache_chunks: int = Field(
        default=65_536, ge=0, description="memo of chunk keys, chunks (1.2 KB each)"
    )
    inline_characters: int = Field(
        default=2_000,
        ge=0,
        description="new text up to this length is encoded on the loop, longer text in a thread",
    )
    remote_seconds: float = Field(default=2.0, gt=0, description="deadline of an engine's /tokenize, seconds")


class HealthSettings(Settings):
    """Checks of engines."""

    interval_seconds: float = Field(
        default=2.0, gt=0, description="pause between two checks of an engine, seconds"
    )
    timeout_seconds: float = Field(default=2.0, gt=0, description="deadline of one check, seconds")
    failures: int = Field(
        default=2, ge=1, description="failed checks in a row until an engine counts as down"
    )
    breaker_failures: int = Field(
        default=5,
        ge=1,
        description="failed requests in a row until an engine gets no more while another can take them",
    )
    breaker_seconds: float = Field(
        default=5.0,
        gt=0,
        description="until one request tries it again, seconds; twice as long each time that fails, up to 60",
    )


class IndexSettings(Settings):
    """The mirror of what replicas hold."""

    max_keys: int = Field(default=4_000_000, ge=1024, description="most keys mirrored of one replica")
    unmanaged_kv_tokens: int = Field(
        default=262_144, ge=0, description="assumed KV space of an engine without feed, tokens"
    )
    stale_seconds: float = Field(
        default=10.0, ge=0, description="how long a mirror without feed is believed, seconds"
    )
    ready_seconds: float = Field(
        default=30.0,
        ge=0,
        description="how long /readyz waits after the start for the feeds of all replicas, seconds",
    )
    silent_seconds: float = Field(
        default=5.0, gt=0, description="a feed without a frame for this long is reconnected, seconds"
    )


class RouterSettings(Settings):
    """Everything the router can be told."""

    host: str = Field(default="127.0.0.1", description="address of the OpenAI endpoint")
    port: int = Field(
        default=names.PORT_ROUTER, ge=0, le=65535, description="port of the OpenAI endpoint; 0: any"
    )
    admin_host: str = Field(default="127.0.0.1", description="address of the admin endpoint")
    admin_port: int = Field(
        default=names.PORT_ROUTER_ADMIN,
        ge=0,
        le=65535,
        description="port of decisions, replicas, metrics; 0: any",
    )
    admin_token_file: Path | None = Field(
        default=None,
        description="file with the admin port's own bearer token, read at every request; none: controls and "
        "decisions take the agents' token, and need none on a loopback admin_host without it",
    )
    admin_list_free: bool = Field(
        default=False,
        description="the list of replicas needs no token, as under the operator, although there is an "
        "admin_token_file",
    )
    relays: int | None = Field(
        default=None,
        ge=0,
        le=64,
        description="processes that clients talk to, beside one for the mind; 0: all is one process; "
        "default: one less than there are cores, at most 8, and 0 on up to two",
    )
    tls: TlsSettings = Field(default=TlsSettings(), description="TLS of the OpenAI endpoint")
    name: str = Field(
        default="",
        max_length=128,
        description="reader id at the agents' feeds, of each router its own; "
        "default: router, with discovery in Kubernetes the host's name, which is the pod's",
    )
    replicas: tuple[ReplicaSettings, ...] = Field(
        default=(), description="YAML list of {name, url, agent}; see also --replica"
    )
    replicas_file: Path | None = Field(
        default=None,
        description="YAML file with a list of {name, url, agent}, read again when it changes; "
        "it may come to exist later",
    )
    kubernetes: KubernetesSettings = Field(
        default=KubernetesSettings(), description="discovery in Kubernetes"
    )
    agent: AgentSettings = Field(default=AgentSettings(), description="agents")
    policy: PolicyName = Field(
        default="kvist",
        description="kvist (predicted TTFT and delay of others), approximate (the same by own dispatches), "
        "prefix-affinity, least-load or round-robin",
    )
    weights: PolicyWeights = Field(default=PolicyWeights(), description="parameters of policies")
    shadows: tuple[PolicyName, ...] = Field(
        default=(),
        description="policies that choose too and are not followed; metrics compare them",
    )
    records: int = Field(default=4096, ge=1, le=1_000_000, description="decision records kept")
    log_level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="log level")
    log: LogSettings = Field(default=LogSettings(), description="the log")
    tracing: TracingSettings = Field(default=TracingSettings(), description="OpenTelemetry traces")
    model: ModelSettings = Field(default=ModelSettings(), description="model files")
    tokens: TokenSettings = Field(default=TokenSettings(), description="tokenization")
    limits: LimitSettings = Field(default=LimitSettings(), description="bounds and deadlines")
    health: HealthSettings = Field(default=HealthSettings(), description="checks of engines")
    index: IndexSettings = Field(default=IndexSettings(), description="mirror of the replicas")
    neighbours: NeighbourSettings = Field(
        default=NeighbourSettings(), description="other routers of the same cluster"
    )
    auth: AuthSettings = Field(default=AuthSettings(), description="API keys")
    tenant: SeparationSettings = Field(default=SeparationSettings(), description="separation of tenants")
    tenants: tuple[TenantSettings, ...] = Field(
        default=(), max_length=MAX_TENANTS, description="YAML list of {name, keys_file, weight, priority, ..}"
    )
    admission: AdmissionSettings = Field(
        default=AdmissionSettings(), description="the queue in front of the replicas"
    )

    @model_validator(mode="after")
    def _check_replicas(self) -> RouterSettings:
        listed = bool(self.replicas) or self.replicas_file is not None
        if not listed and not self.kubernetes.service:
            raise ValueError(
                "no replicas: give --replica URL, `replicas`, `replicas_file` or `kubernetes.service`"
            )
        if listed and self.kubernetes.service:
            raise ValueError(
                "replicas come from one place: give either kubernetes.service, or replicas and replicas_file"
            )
        check_names(self.replicas)
        check_tenants(self.tenants, self.tenant)
        return self

    @property
    def reader(self) -> str:
        """See name."""
        return self.name or (socket.gethostname() if self.kubernetes.service else "router")

    @property
    def grace_seconds(self) -> float:
        """See limits.grace_seconds."""
        given = self.limits.grace_seconds
        if given is not None:
            return given
        return KUBERNETES_GRACE_SECONDS if self.kubernetes.service else 0.0


def check_names(replicas: tuple[ReplicaSettings, ...]) -> None:
    """Raise ValueError when two replicas share a label."""
    labels = [replica.label for replica in replicas]
    for label in labels:
        if labels.count(label) > 1:
            raise ValueError(f"replicas: name {label!r} is given twice; give each replica its own name")
