"""Configuration of the operator: one YAML file, environment (`KVIST_OPERATOR_`) and flags, the same names.

Called by app.py; everything else gets the frozen object or plain values.
"""

from __future__ import annotations

from typing import Final, Literal, Self

from pydantic import Field, model_validator

from kvist_connector import names
from kvist_connector.settings import Settings

_NAME: Final = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"


class ImageSettings(Settings):
    """Container images of clusters that name none."""

    engine: str = Field(
        default="ghcr.io/kvist/engine:0.1.0", min_length=1, max_length=512, description="engine and agent"
    )
    router: str = Field(
        default="ghcr.io/kvist/router:0.1.0", min_length=1, max_length=512, description="router"
    )
    agent: str = Field(
        default="", max_length=512, description="agent; empty: the engine's image, which has it"
    )
    redis: str = Field(
        default="docker.io/library/redis:8", min_length=1, max_length=512, description="managed Redis"
    )
    pull_policy: Literal["", "Always", "IfNotPresent", "Never"] = Field(
        default="", description="imagePullPolicy of all; empty: Kubernetes' default for the tag"
    )
    pull_secrets: tuple[str, ...] = Field(
        default=(), max_length=16, description="YAML list of imagePullSecrets in the clusters' namespaces"
    )


class LeaseSettings(Settings):
    """Which of several operators acts. A takeover after a kill takes at most duration + retry."""

    name: str = Field(default="kvist-operator", pattern=_NAME, max_length=253, description="its name")
    duration_seconds: float = Field(
        default=15.0, ge=5, le=300, description="a lease not renewed for this long is taken over, seconds"
    )
    renew_seconds: float = Field(default=5.0, gt=0, description="pause between renewals, seconds")
    retry_seconds: float = Field(
        default=2.0, gt=0, description="pause between looks of an operator that waits, seconds"
    )

    @model_validator(mode="after")
    def _renewed_in_time(self) -> Self:
        if self.renew_seconds * 2 > self.duration_seconds:
            raise ValueError(
                f"renew_seconds {self.renew_seconds:g} must be at most half of duration_seconds "
                f"{self.duration_seconds:g}: one failed renewal must not lose the lease"
            )
        return self


class WebhookSettings(Settings):
    """Advice on CacheClusters at admission; off without a configuration."""

    configuration: str = Field(
        default="",
        pattern=rf"^$|{_NAME}",
        max_length=253,
        description="ValidatingWebhookConfiguration that the leader writes its authorities into; empty: off",
    )
    secret: str = Field(
        default="kvist-webhook", pattern=_NAME, max_length=253, description="Secret with the certificates"
    )
    service: str = Field(
        default="kvist-webhook", pattern=_NAME, max_length=63, description="Service that the API server calls"
    )
    names: tuple[str, ...] = Field(
        default=(),
        max_length=16,
        description="YAML list of more DNS names or addresses that it is called by, for a configuration "
        "with a url",
    )
    host: str = Field(default="0.0.0.0", description="address to listen on")
    port: int = Field(default=8443, ge=0, le=65535, description="port to listen on; 0: any")
    seconds: float = Field(
        default=30.0, gt=0, description="pause between looks at Secret and configuration, seconds"
    )


class OperatorSettings(Settings):
    """Everything the operator can be told."""

    namespace: str = Field(
        default="default", pattern=_NAME, max_length=63, description="its own namespace: the Lease is there"
    )
    watch_namespaces: tuple[str, ...] = Field(
        default=(),
        max_length=256,
        description="YAML list of namespaces to serve, by Roles only; empty: all, by a ClusterRole",
    )
    identity: str = Field(
        default="",
        max_length=253,
        description="holder in the Lease; default: host name and a random part",
    )
    host: str = Field(default="0.0.0.0", description="address of health checks and metrics")
    port: int = Field(
        default=names.PORT_OPERATOR, ge=0, le=65535, description="port of health checks and metrics; 0: any"
    )
    workers: int = Field(default=8, ge=1, le=64, description="clusters reconciled at the same time")
    max_clusters: int = Field(default=10_000, ge=1, description="most clusters that wait in the queue")
    sweep_seconds: float = Field(
        default=120.0, gt=0, description="pause between full lists that find what a watch lost, seconds"
    )
    poll_seconds: float = Field(
        default=15.0, gt=0, description="pause between questions to the routers of settled clusters, seconds"
    )
    api_seconds: float = Field(
        default=15.0, gt=0, description="deadline of one call of the API server, seconds"
    )
    docs_url: str = Field(
        default="", max_length=512, description="where docs/ is published, for runbook links of alerts"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="log level")
    images: ImageSettings = Field(default=ImageSettings(), description="images of this release")
    lease: LeaseSettings = Field(default=LeaseSettings(), description="leader election")
    webhook: WebhookSettings = Field(default=WebhookSettings(), description="validating webhook")
