"""Section `cache`: tiers beside every engine and behind all of them."""

from __future__ import annotations

from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, StringConstraints, WithJsonSchema, model_validator

from kvist_connector.keys import CHUNK_TOKENS
from kvist_operator.spec.base import (
    Duration,
    Items,
    Overlay,
    Quantity,
    Resources,
    SecretRef,
    Section,
    Text,
    passable,
    rules,
)
from kvist_operator.spec.claim import CLAIM_SCHEMA
from kvist_operator.spec.peers import Peers
from kvist_operator.spec.tier_calls import TierCalls

_REDIS_URL = r"^rediss?://([^\s:@/]+@)?[^\s@/]+(/[0-9]{1,3})?$"
_BUCKET_URL = r"^(s3|s3a|gs|az|azure|abfs|abfss|adl|file)://[^\s]+$"
# A password in an address would be seen by everybody who may read the manifest.
RedisUrl = Annotated[str, StringConstraints(pattern=_REDIS_URL, max_length=512), AfterValidator(passable)]
BucketUrl = Annotated[str, StringConstraints(pattern=_BUCKET_URL, max_length=2048), AfterValidator(passable)]
ServerUrl = Annotated[
    str, StringConstraints(pattern=r"^https?://[^\s]+$", max_length=2048), AfterValidator(passable)
]


class Retention(Section):
    """What becomes of the claims that volumeClaimTemplate made."""

    when_deleted: Literal["Delete", "Retain"] = Field(
        default="Delete", description="When the cluster is deleted. Default: Delete."
    )
    when_scaled: Literal["Delete", "Retain"] = Field(
        default="Delete", description="When their replica is scaled away. Default: Delete."
    )


class Disk(Section):
    """The disk tier of every replica."""

    size: Quantity = Field(gt=0, description="Limit of each replica's disk tier, bytes.")
    path: Text | None = Field(
        default=None,
        description="Parent folder, used by kvist up only. Default: its run folder.",
    )
    fsync: Literal["none", "data"] = Field(
        default="none",
        description="data: chunks survive a power cut. none: they survive a crash; checksums find the rest. "
        "Default: none.",
    )
    direct: bool = Field(
        default=False,
        description="true: past the page cache, which then keeps no second copy of what is in memory. "
        "Default: false.",
    )
    deadline: Duration | None = Field(
        default=None,
        gt=0,
        le=600,
        description="Time after which reading or writing one chunk counts as hanging: the disk is left alone "
        "until it has come back. Default: 30s.",
    )
    volume_claim_template: Annotated[Overlay, WithJsonSchema(CLAIM_SCHEMA)] | None = Field(
        default=None,
        description="PersistentVolumeClaim spec with resources.requests.storage somewhat above size; it "
        "cannot be added, changed or taken away later. Kubernetes only. Default: none, an emptyDir.",
    )
    retention: Retention = Field(
        default_factory=Retention,
        description="What becomes of the claims. Kubernetes only. Default: deleted with replica or cluster.",
    )


class ManagedRedis(Section):
    """A Redis that the operator runs. Kubernetes only."""

    replicas: int = Field(default=1, ge=1, le=64, description="Redis pods; keys are spread. Default: 1.")
    memory: Quantity = Field(default=4 * 1024**3, description="maxmemory of each, bytes. Default: 4Gi.")
    image: Text | None = Field(default=None, description="Container image. Default: the one of this release.")
    resources: Resources = Field(
        default_factory=Resources, description="Of the Redis container. Default: derived from memory."
    )


class Sentinel(Section):
    """Sentinels that know which server is the primary now."""

    primary: Text = Field(description="Name under which they watch the primary.")
    password: SecretRef | None = Field(
        default=None, description="Secret with the password of the Sentinels themselves. Default: none."
    )


class Redis(TierCalls):
    """Shared tier in Redis: managed or external."""

    model_config = rules(
        ("has(self.managed) != has(self.urls)", "give exactly one of managed and urls"),
        (
            "!has(self.ca) || (has(self.urls) && self.urls.exists(u, u.startsWith('rediss://')))",
            "ca is for rediss:// addresses: use one of those in urls, or leave ca out",
        ),
        (
            "!has(self.managed) || !(has(self.sentinel) || (has(self.cluster) && self.cluster))",
            "cluster and sentinel are for urls: leave managed out",
        ),
        (
            "!has(self.sentinel) || !has(self.cluster) || !self.cluster",
            "cluster and sentinel exclude each other: give one of them",
        ),
    )

    managed: ManagedRedis | None = Field(default=None, description="Run one. Kubernetes only. Default: none.")
    urls: Annotated[Items[RedisUrl], Field(max_length=64)] = Field(
        default=(),
        description="redis://[user@]host:port addresses of an external one, rediss:// with TLS; keys are "
        "spread over them. Default: none.",
    )
    cluster: bool = Field(
        default=False,
        description="true: urls are members of one Redis Cluster, which names the others. Default: false.",
    )
    sentinel: Sentinel | None = Field(
        default=None,
        description="urls are Sentinels, who are asked which server is the primary. Default: none.",
    )
    password: SecretRef | None = Field(default=None, description="Secret with the password. Default: none.")
    ca: SecretRef | None = Field(
        default=None, description="Secret with the CA certificate. Default: system CAs."
    )

    @model_validator(mode="after")
    def _one_of(self) -> Self:
        if (self.managed is None) == (not self.urls):
            raise ValueError("give exactly one of managed and urls")
        if self.ca is not None and not any(url.startswith("rediss://") for url in self.urls):
            raise ValueError("ca is for rediss:// addresses: use one of those in urls, or leave ca out")
        if self.cluster or self.sentinel is not None:
            self._one_group()
        return self

    def _one_group(self) -> None:
        if self.managed is not None:
            raise ValueError("cluster and sentinel are for urls: leave managed out")
        if self.cluster and self.sentinel is not None:
            raise ValueError("cluster and sentinel exclude each other: give one of them")
        parts = [urlsplit(url) for url in self.urls]
        if len({(part.scheme, part.username, part.path.strip("/")) for part in parts}) > 1:
            raise ValueError("urls of one cluster, and of Sentinels, may differ in host and port only")
        if self.cluster and parts[0].path.strip("/") not in ("", "0"):
            raise ValueError("a Redis Cluster has database 0 only: leave the number out of urls")


class ObjectStore(TierCalls):
    """Shared tier in an object store."""

    url: BucketUrl = Field(description="Bucket and prefix, such as s3://bucket/prefix.")
    endpoint: ServerUrl | None = Field(
        default=None, description="Address of an S3-compatible server. Default: the provider's."
    )
    region: Text | None = Field(default=None, description="Region of the bucket. Default: the server's own.")
    credentials: SecretRef | None = Field(
        default=None,
        description="Secret with the credentials file: AWS credentials (s3), service account (gs), settings "
        "(az). Default: the pod's identity.",
    )


class Remote(Section):
    """Tiers that all replicas share."""

    model_config = rules(
        (
            "!has(self.whenDeleted) || self.whenDeleted == 'Retain' || has(self.objectStore) || "
            "(has(self.redis) && has(self.redis.urls) && size(self.redis.urls) > 0)",
            "whenDeleted: Clear is for an external Redis or an object store: name one, or leave it out",
        ),
    )

    redis: Redis | None = Field(default=None, description="Redis tier. Default: none.")
    object_store: ObjectStore | None = Field(default=None, description="Object store tier. Default: none.")
    when_deleted: Literal["Retain", "Clear"] = Field(
        default="Retain",
        description="What becomes of chunks in external Redis and object store when the cluster is deleted. "
        "Retain: the next cluster of this model finds them. Clear: an agent removes this model's, those "
        "of other clusters that share the server too, before the pods go; the deletion waits for it, at "
        "most 60 s. A managed Redis goes with its cluster. Kubernetes only. Default: Retain.",
    )


Codec = Literal["none", "auto", "zstd", "fp8"]


class Compression(Section):
    """Compression of what leaves memory."""

    codec: Codec = Field(
        default="none",
        description="Of disk, Redis and object store. none: as they are. zstd: byte planes of 16-bit values. "
        "auto: zstd while a tier's reads were measured to end earlier with it. fp8: LOSSY, values are "
        "rounded to float8_e4m3 and the model's answers change. Default: none.",
    )
    disk: Codec | None = Field(default=None, description="Of the disk tier instead. Default: codec.")
    redis: Codec | None = Field(default=None, description="Of Redis instead. Default: codec.")
    object_store: Codec | None = Field(
        default=None, description="Of the object store instead. Default: codec."
    )


class Encryption(Section):
    """Encryption of what leaves memory, AES-256-GCM."""

    keys: SecretRef | None = Field(
        default=None,
        description="Secret with the key file: a key a line, `name base64-of-32-bytes`; the first encrypts, "
        "each decrypts. Read again when it changes. Default: none, chunks are stored plain.",
    )


class Cache(Section):
    """What is kept of computed KV, and where."""

    model_config = rules(
        (
            f"!has(self.chunkTokens) || self.chunkTokens == {CHUNK_TOKENS}",
            f"this release stores chunks of {CHUNK_TOKENS} tokens: leave chunkTokens out",
        ),
        (
            "!has(self.compression) || !has(self.compression.disk) || has(self.disk)",
            "compression.disk is for a disk: name one, or leave it out",
        ),
        (
            "!has(self.compression) || !has(self.compression.redis) || "
            "(has(self.remote) && has(self.remote.redis))",
            "compression.redis is for a Redis: name one, or leave it out",
        ),
        (
            "!has(self.compression) || !has(self.compression.objectStore) || "
            "(has(self.remote) && has(self.remote.objectStore))",
            "compression.objectStore is for an object store: name one, or leave it out",
        ),
        (
            "!has(self.placement) || self.placement != 'exclusive' || has(self.disk)",
            "placement: exclusive is for memory and a disk: name a disk, or leave it out",
        ),
    )

    enabled: bool = Field(
        default=True, description="false: plain engines without connector and agent. Default: true."
    )
    chunk_tokens: int = Field(
        default=CHUNK_TOKENS,
        ge=16,
        le=4096,
        description=f"Tokens of a chunk, the unit of storing and loading. Default: {CHUNK_TOKENS}.",
    )
    memory: Quantity = Field(
        default=1024**3,
        description="Memory tier of each replica, bytes; 0: index the engine's own KV only. Default: 1Gi.",
    )
    disk: Disk | None = Field(default=None, description="Disk tier of each replica. Default: none.")
    remote: Remote = Field(
        default_factory=Remote, description="Tiers that all replicas share. Default: none."
    )
    compression: Compression = Field(
        default_factory=Compression, description="Of lower tiers. Default: none."
    )
    encryption: Encryption = Field(default_factory=Encryption, description="Of lower tiers. Default: none.")
    peers: Peers = Field(
        default_factory=Peers, description="Memory of the other replicas. Default: it is not read."
    )
    eviction: Literal["cost", "lru"] = Field(
        default="cost",
        description="cost: recompute time saved per byte. lru: oldest use first. Default: cost.",
    )
    placement: Literal["inclusive", "exclusive"] = Field(
        default="inclusive",
        description="inclusive: what is in memory is on disk too. exclusive: in one of both, so that they "
        "hold more together and each move costs a write; needs a disk. Redis and object store hold all "
        "either way. Default: inclusive.",
    )
    lookup_deadline: Duration | None = Field(
        default=None,
        gt=0,
        le=600,
        description="Time that a request waits at most for chunks from lower tiers before it is computed "
        "from what is in memory. Default: 5s.",
    )
    ttl: Duration | None = Field(
        default=None,
        description="Age after which Redis drops a chunk; an object store has lifecycle rules for that. "
        "Default: none, never by age.",
    )

    @model_validator(mode="after")
    def _codecs_of_tiers_that_are_there(self) -> Self:
        given, remote = self.compression, self.remote
        for name, codec, tier, what in (
            ("disk", given.disk, self.disk, "a disk"),
            ("redis", given.redis, remote.redis, "a Redis"),
            ("objectStore", given.object_store, remote.object_store, "an object store"),
        ):
            if codec is not None and tier is None:
                raise ValueError(f"compression.{name} is for {what}: name one, or leave it out")
        return self

    @model_validator(mode="after")
    def _placement_of_two(self) -> Self:
        if self.placement == "exclusive" and (self.disk is None or not self.memory):
            raise ValueError("placement: exclusive is for memory and a disk: name a disk, or leave it out")
        return self
