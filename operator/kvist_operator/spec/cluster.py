"""The `CacheCluster` object, and how its text becomes one.

Called by `kvist up` (file) and the operator (object of the API server).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, Literal

import yaml
from pydantic import Field

from kvist_connector import settings
from kvist_connector.errors import ConfigError
from kvist_connector.keys import CHUNK_TOKENS
from kvist_connector.names import API_VERSION, KIND
from kvist_connector.yaml_text import YamlTextError, parse_documents
from kvist_operator.spec.base import Name, Section, rules
from kvist_operator.spec.cache import Cache
from kvist_operator.spec.engine import Engine
from kvist_operator.spec.model import Model
from kvist_operator.spec.platform import Monitoring, Security
from kvist_operator.spec.router import Router

MAX_MANIFEST_BYTES = 1024 * 1024
# Pods, Services and volumes carry the name with a suffix, and each kind has its own limit.
MAX_NAME: Final = 40
_CLAIM: Final = "cache.disk.volumeClaimTemplate"
_HAS_CLAIM: Final = f"(has(self.cache) && has(self.cache.disk) && has(self.{_CLAIM}))"


class Metadata(Section):
    """The part of a Kubernetes ObjectMeta that a person writes."""

    name: Name = Field(description="Name of the cluster: lower-case letters, digits and '-', at most 63.")
    namespace: Name | None = Field(default=None, description="Namespace. Kubernetes only. Default: default.")
    labels: dict[str, str] = Field(
        default_factory=dict, description="Labels. Kubernetes only. Default: none."
    )
    annotations: dict[str, str] = Field(
        default_factory=dict, description="Annotations. Kubernetes only. Default: none."
    )


class Spec(Section):
    """One model served by one homogeneous pool of engines that share their KV caches."""

    model_config = rules(
        (
            "!has(self.engine) || !has(self.engine.blockSize) || "
            f"{CHUNK_TOKENS} % self.engine.blockSize == 0 || "
            "(has(self.cache) && has(self.cache.enabled) && !self.cache.enabled)",
            f"engine.blockSize must divide a chunk of {CHUNK_TOKENS} tokens",
        ),
        (
            f"{_HAS_CLAIM} == {_HAS_CLAIM.replace('self', 'oldSelf')} && (!{_HAS_CLAIM} || "
            f"self.{_CLAIM} == oldSelf.{_CLAIM})",
            "cache.disk.volumeClaimTemplate cannot be added, changed or taken away: make a new cluster",
        ),
    )

    model: Model = Field(description="What is served.")
    engine: Engine = Field(default_factory=Engine, description="The vLLM replicas.")
    cache: Cache = Field(default_factory=Cache, description="What is kept of computed KV, and where.")
    router: Router = Field(default_factory=Router, description="The OpenAI-compatible endpoint.")
    security: Security = Field(default_factory=Security, description="Tokens and network. Kubernetes only.")
    monitoring: Monitoring = Field(default_factory=Monitoring, description="Prometheus and Grafana objects.")


class CacheCluster(Section):
    """A manifest, valid in itself; checks.py holds what needs the machine or the model."""

    model_config = rules(
        (
            f"self.metadata.name.matches('^[a-z][-a-z0-9]*$') && self.metadata.name.size() <= {MAX_NAME}",
            f"metadata.name begins with a letter, holds no dots and has at most {MAX_NAME} characters",
        ),
    )

    api_version: Literal["kvist.dev/v1alpha1"] = Field(description=f"Always {API_VERSION}.")
    kind: Literal["CacheCluster"] = Field(description=f"Always {KIND}.")
    metadata: Metadata = Field(description="Name of the cluster.")
    spec: Spec = Field(description="What the cluster is.")

    @property
    def name(self) -> str:
        """metadata.name"""
        return self.metadata.name

    @property
    def served_name(self) -> str:
        """The name that clients send as `model`."""
        model = self.spec.model
        folder = Path(model.name).name if model.name[0] in "./~" else ""
        return model.served_name or folder or model.name


def parse(data: Any) -> CacheCluster:
    """A manifest from plain data; raises ConfigError with every wrong field in it."""
    if not isinstance(data, dict):
        raise ConfigError(
            f"a manifest is a mapping with apiVersion, kind, metadata and spec, not {settings.brief(data)}"
        )
    return settings.validate(CacheCluster, data)


def loads(text: str, where: str = "manifest") -> CacheCluster:
    """A manifest from YAML text with exactly one document."""
    try:
        documents = parse_documents(text)
    except YamlTextError as error:
        raise ConfigError(f"{where}: not YAML: {error}") from error
    if len(documents) != 1:
        raise ConfigError(f"{where}: holds {len(documents)} YAML documents, exactly one {KIND} is expected")
    return parse(documents[0])


def load(path: Path) -> CacheCluster:
    """A manifest from a file."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_MANIFEST_BYTES + 1)
        if len(text) > MAX_MANIFEST_BYTES:
            raise ConfigError(f"{path}: larger than {MAX_MANIFEST_BYTES} bytes, so not a manifest")
        return loads(text.decode(), str(path))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text") from error


def dump(cluster: CacheCluster, *, defaults: bool = False) -> str:
    """YAML that loads() reads back to an equal object; with `defaults` also what nobody set."""
    return yaml.safe_dump(
        cluster.model_dump(mode="json", by_alias=True, exclude_unset=not defaults),
        sort_keys=False,
        allow_unicode=True,
    )
