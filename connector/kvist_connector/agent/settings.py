"""Settings of one agent. Parsed once in the composition root; docs/reference.md shows the table."""

from __future__ import annotations

from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, ConfigDict, Field, model_validator

from kvist_connector import names
from kvist_connector.agent.coding_settings import COMPRESSION, EncryptionSettings
from kvist_connector.agent.peer_settings import PeerSettings
from kvist_connector.agent.redis_settings import RedisSettings
from kvist_connector.agent.server_settings import concurrency, deadline, lookup_deadline, pause
from kvist_connector.quantity import Quantity
from kvist_connector.settings import FileLocation, Settings
from kvist_connector.tiers.coding import Compression
from kvist_connector.tls import MutualTls

OBJECT_SCHEMES = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "adl", "file")
# What a subscriber can connect to; ZMQ itself says no more than "invalid argument".
_ENDPOINT = r"^(tcp://[^\s*]+:[0-9]{1,5}|ipc://\S+|inproc://\S+)$"


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def _object_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in OBJECT_SCHEMES or not (parts.netloc or parts.path.strip("/")):
        raise ValueError("give s3://bucket/prefix, gs://..., az://... or file:///folder")
    return url


class DiskSettings(Settings):
    """The disk tier; absent unless a path is given."""

    path: Path | None = Field(None, description="folder of the disk tier; default none: no disk tier")
    size: Quantity = Field(
        10 * 1024**3, gt=0, description="most bytes in the folder, bytes or quantity (20Gi); default 10Gi"
    )
    fsync: Literal["none", "data"] = Field(
        "none",
        description="none (default): a power cut may lose chunks, never serves wrong ones; data: sync files",
    )
    direct: bool = Field(
        False,
        description="true: past the page cache, which then keeps no second copy of what is in memory; false "
        "(default): through it. Compressed, encrypted and odd-sized chunks always go through it",
    )
    deadline: float = Field(
        30.0,
        gt=0,
        le=600,
        description="seconds after which reading or writing one chunk counts as hanging: the disk is left "
        "alone until it has come back; default 30",
    )
    compression: Compression = Field("none", description=COMPRESSION)


class ObjectStoreSettings(Settings):
    """The object store tier, shared by all agents with the same URL; absent unless one is given."""

    url: Annotated[str, AfterValidator(_object_url)] | None = Field(
        None,
        description="s3://bucket/prefix, gs://..., az://... or file:///folder; default none: no such tier",
    )
    endpoint: str | None = Field(
        None,
        pattern=r"^https?://[^\s]+$",
        description="address of an S3-compatible server, http:// for one without TLS; default the provider's",
    )
    region: str | None = Field(None, description="region of the bucket; default the provider's own")
    credentials_file: Path | None = Field(
        None,
        description="AWS credentials file (s3, read again each minute), service account file (gs) or a "
        "section of settings (az); default the machine's identity",
    )
    lookup_deadline: float = lookup_deadline(0.5, "what is stored")
    deadline: float = deadline(10.0)
    pause: float = pause(10.0, "failing object store")
    concurrency: int = concurrency(8)
    compression: Compression = Field("none", description=COMPRESSION)


class HttpSettings(Settings):
    """The HTTP API and feed."""

    host: str = Field("127.0.0.1", description="address to listen on; default 127.0.0.1")
    port: int = Field(names.PORT_AGENT, ge=0, le=65535, description="port; 0 takes a free one; default 8200")
    token_file: Path | None = Field(
        None, description="file with the bearer token; default none, then only loopback hosts are allowed"
    )
    read_token_file: Path | None = Field(
        None, description="file with a bearer token that allows only to read; default none: there is none"
    )

    @model_validator(mode="after")
    def _token_or_loopback(self) -> HttpSettings:
        if self.token_file is None and not _is_loopback(self.host):
            raise ValueError("without http.token_file only a loopback host is allowed: set a token file")
        if self.read_token_file is not None and self.token_file is None:
            raise ValueError("http.read_token_file limits nothing without http.token_file: set both")
        return self


class AgentTls(MutualTls):
    """TLS of the HTTP API and the peer port, and towards peers."""

    clients: Literal["certificate", "token"] = Field(
        "certificate",
        description="certificate (default): who asks for more than figures needs one of ca_file, beside the "
        "token; token: that will do; peers need one anyway",
    )


class AgentSettings(Settings):
    """Everything a cache agent can be told."""

    model_config = ConfigDict(coerce_numbers_to_str=True)

    replica: str = Field(min_length=1, description="name of this replica in metrics and feed; required")
    socket: FileLocation = Field(description="path of the Unix socket for the engine; required")
    arena: FileLocation = Field(description="path of the arena file, best under /dev/shm; required")
    memory: Quantity = Field(
        1024**3, description="memory tier, bytes or quantity (8Gi); 0 = index only; default 1Gi"
    )
    disk: DiskSettings = Field(default_factory=DiskSettings)
    redis: RedisSettings = Field(default_factory=RedisSettings)
    object_store: ObjectStoreSettings = Field(default_factory=ObjectStoreSettings)
    peer: PeerSettings = Field(default_factory=PeerSettings)
    encryption: EncryptionSettings = Field(default_factory=EncryptionSettings)
    tls: AgentTls = Field(default_factory=AgentTls)
    http: HttpSettings = HttpSettings(host="127.0.0.1", port=names.PORT_AGENT, token_file=None)
    kv_events: str | None = Field(
        None,
        pattern=_ENDPOINT,
        description="ZMQ endpoint of the engine's KV events; default none: GPU residency unknown",
    )
    kv_events_replay: str | None = Field(
        None,
        pattern=_ENDPOINT,
        description="ZMQ replay endpoint; default none: a gap makes GPU residency unknown",
    )
    eviction: Literal["lru", "cost"] = Field(
        "cost",
        description="what leaves a full tier first: lru, or cost (default), least seconds saved per byte",
    )
    placement: Literal["inclusive", "exclusive"] = Field(
        "inclusive",
        description="inclusive (default): what is in memory is on disk too; exclusive: in one of both, so "
        "that they hold more together and each move costs a write; shared tiers hold all either way",
    )
    lookup_deadline: float = Field(
        5.0,
        gt=0,
        le=600,
        description="seconds until a pending request is answered with what is resident; default 5",
    )
    shutdown_deadline: float = Field(
        10.0, ge=0, le=600, description="seconds that SIGTERM waits for write-behind; default 10"
    )
    idle_exit: float = Field(
        0.0, ge=0, description="seconds without connections before the agent exits; 0 (default) = never"
    )

    @property
    def lossy(self) -> tuple[str, ...]:
        """Settings by which chunks are stored rounded."""
        tiers = {
            "disk": self.disk.compression,
            "redis": self.redis.compression,
            "object_store": self.object_store.compression,
        }
        return tuple(f"{name}.compression" for name, rule in tiers.items() if rule == "fp8")

    @model_validator(mode="after")
    def _token_or_loopback_peers(self) -> AgentSettings:
        if self.peer.host is not None and self.http.token_file is None and not _is_loopback(self.peer.host):
            raise ValueError(
                "peer.host: without http.token_file only a loopback host is allowed: set a token file"
            )
        if self.placement == "exclusive" and (self.disk.path is None or not self.memory):
            raise ValueError("placement: exclusive is for memory and a disk: set disk.path and memory too")
        if self.peer.host is not None and not self.memory:
            raise ValueError("peer.host: with memory 0 there is nothing to serve: leave it out")
        return self
