"""Section `router`: the one OpenAI-compatible endpoint."""

from __future__ import annotations

from typing import Annotated, Final, Literal, Self

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from kvist_operator.spec.base import (
    Duration,
    EnvVar,
    Items,
    Named,
    Overlay,
    Quantity,
    Resources,
    SecretRef,
    Section,
    Text,
    rules,
)

PolicyName = Literal["kvist", "approximate", "prefix-affinity", "least-load", "round-robin"]


def _each_once(names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{name!r} is given twice; keep one of the two")
    return names


class RouterLimits(Section):
    """What a router accepts at once."""

    body: Quantity = Field(
        default=128 * 1024**2, ge=1024, description="Largest request body, bytes. Default: 128Mi."
    )
    concurrent_requests: int = Field(
        default=8192, ge=1, le=1_000_000, description="Requests in flight per router. Default: 8192."
    )
    requests_per_engine: int = Field(
        default=0,
        ge=0,
        le=1_000_000,
        description="Requests sent to each engine at once by a router; others wait in it, by priority and by "
        "tenant in turns. Default: 0, all wait in the engines.",
    )
    first_byte_deadline: Duration = Field(
        default=600.0, gt=0, description="Longest wait for the first byte of an answer. Default: 10m."
    )
    continuations: int = Field(
        default=0,
        ge=0,
        le=8,
        description="How often a stream whose engine dies goes on at another replica, where that is exact. "
        "Default: 0, it ends with an error.",
    )
    queue_deadline: Duration = Field(
        default=60.0,
        ge=0,
        description="Longest wait for a replica while none can take the request, as when the only one is "
        "replaced; 0: refuse at once. Kubernetes only. Default: 1m.",
    )


class RouterAuth(Section):
    """Who may send requests."""

    api_keys: SecretRef | None = Field(
        default=None,
        description="Secret with accepted API keys, hashed, one a line: sha256:HEX, or sha256:HEX TENANT. "
        "They may change while routers run. Default: none, no check without tenants.",
    )
    admin_token: SecretRef | None = Field(
        default=None,
        description="Secret with the token of the admin port: decisions, explain and controls take it, and "
        "the agents' token no more. It may change while routers run. Default: the agents' token.",
    )


class RouterTls(Section):
    """Certificate of the router's OpenAI port, for the names that clients use."""

    certificate: SecretRef = Field(
        description="Secret with the certificate and its chain, PEM: tls.crt of a kubernetes.io/tls one."
    )
    private_key: SecretRef = Field(description="Secret with its key, PEM: tls.key.")


class Tenant(Section):
    """Requests of a tenant share KV only with each other; its API key says whose a request is."""

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]+$", max_length=63)] = Field(
        description="Name in metrics, part of the cache salt."
    )
    api_keys: SecretRef = Field(
        description="Secret with the tenant's API keys, hashed, one a line: sha256:HEX."
    )
    weight: float = Field(
        default=1.0, gt=0, le=1000, description="Its share of tokens while requests wait. Default: 1."
    )
    priority: int = Field(
        default=0,
        ge=-100,
        le=100,
        description="Requests of a lower number go first while requests wait. Default: 0.",
    )
    requests_per_minute: float | None = Field(
        default=None, gt=0, description="Most requests a minute, at each router. Default: any number."
    )
    cache_tokens: int | None = Field(
        default=None,
        ge=0,
        le=1_000_000_000_000,
        description="Most tokens whose KV each engine's agent keeps of it in memory and on disk. Default: as "
        "there is room.",
    )
    tokens_per_minute: float | None = Field(
        default=None,
        gt=0,
        description="Most tokens of prompts and answers a minute, at each router. Default: any number.",
    )


class Autoscaling(Section):
    """A HorizontalPodAutoscaler for the routers."""

    model_config = rules(
        (
            "(has(self.minReplicas) ? self.minReplicas : 2) <= self.maxReplicas",
            "minReplicas (2 by default) is at most maxReplicas",
        ),
    )

    min_replicas: int = Field(default=2, ge=1, le=256, description="Fewest router pods. Default: 2.")
    max_replicas: int = Field(ge=1, le=256, description="Most router pods.")
    cpu_utilization: int = Field(
        default=70, ge=1, le=1000, description="Target, percent of the CPU requested. Default: 70."
    )

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_replicas > self.max_replicas:
            raise ValueError("minReplicas (2 by default) is at most maxReplicas")
        return self


class PolicyWeights(Section):
    """Parameters of the policies; docs/router.md has the formulas."""

    standstill: float | None = Field(
        default=None,
        ge=0,
        le=100,
        description="kvist, approximate: what a second in which an answer stands still counts, in seconds of "
        "waiting for a first token. Default: 0.5.",
    )
    tie_ratio: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="kvist, approximate: costs within this share of the least predicted TTFT are equal. "
        "Default: 0.05.",
    )
    tie_seconds: float | None = Field(
        default=None,
        ge=0,
        le=60,
        description="kvist, approximate: and those within so many seconds of it. Default: 0.005.",
    )
    bound: float | None = Field(
        default=None,
        ge=1,
        le=1000,
        description="prefix-affinity: most requests in flight at an engine, in shares of the mean. "
        "Default: 1.25.",
    )


_OF_AFFINITY: Final = "weights.bound is for prefix-affinity, which is neither the policy nor a shadow"
_OF_KVIST: Final = (
    "weights.standstill, tieRatio and tieSeconds are for kvist and approximate, which are neither the policy "
    "nor a shadow"
)
_USED: Final = {
    "kvist": "!has(self.policy) || self.policy == 'kvist' || self.policy == 'approximate' || "
    "has(self.shadows) && self.shadows.exists(name, name == 'kvist' || name == 'approximate')",
    "prefix-affinity": "has(self.policy) && self.policy == 'prefix-affinity' || "
    "has(self.shadows) && self.shadows.exists(name, name == 'prefix-affinity')",
}


def _without(policy: str, *weights: str) -> str:
    """CEL: none of the weights is given, or the policy is used."""
    given = " && ".join(f"!has(self.weights.{weight})" for weight in weights)
    return f"!has(self.weights) || {given} || {_USED[policy]}"


class Router(Section):
    """Where requests arrive and how a replica is chosen."""

    model_config = rules(
        (_without("prefix-affinity", "bound"), _OF_AFFINITY),
        (_without("kvist", "standstill", "tieRatio", "tieSeconds"), _OF_KVIST),
    )

    replicas: int = Field(
        default=1, ge=1, le=256, description="Router pods; kvist up runs one. Kubernetes only. Default: 1."
    )
    relays: int | None = Field(
        default=None,
        ge=0,
        le=64,
        description="Processes of each router that clients talk to, beside one that decides; 0: all is one "
        "process. Default: one less than its cores, at most 8, and 0 on up to two.",
    )
    autoscaling: Autoscaling | None = Field(
        default=None,
        description="Scale routers by CPU; replicas is where it starts. Kubernetes only. Default: none.",
    )
    policy: PolicyName = Field(
        default="kvist",
        description="How a replica is chosen: kvist predicts TTFT on each and what it costs others. "
        "Default: kvist.",
    )
    shadows: Annotated[
        Items[PolicyName],
        Field(max_length=5, json_schema_extra={"x-kubernetes-list-type": "set"}),
        AfterValidator(_each_once),
    ] = Field(
        default=(),
        description="Policies that choose on every request, too, and are not followed; metrics compare them. "
        "Default: none.",
    )
    weights: PolicyWeights = Field(
        default_factory=PolicyWeights, description="Parameters of the policies. Default: their own."
    )
    limits: RouterLimits = Field(default_factory=RouterLimits, description="What a router accepts at once.")
    auth: RouterAuth = Field(
        default_factory=RouterAuth, description="Who may send requests. Default: everyone."
    )
    tls: RouterTls | None = Field(
        default=None,
        description="TLS at the router; new certificates are taken while routers run. Default: none, HTTP.",
    )
    tenants: Named[Tenant] = Field(
        default=(),
        description="Tenants whose KV is kept apart, each with API keys of its own. Default: none.",
    )
    env: Named[EnvVar] = Field(
        default=(),
        description="More environment variables of the router. Default: none.",
    )
    image: Text | None = Field(
        default=None, description="Container image. Kubernetes only. Default: the one of this release."
    )
    resources: Resources = Field(
        default_factory=Resources,
        description="Of the router container. Kubernetes only. Default: requests of 250m CPU, 512Mi.",
    )
    pod_template: Overlay = Field(
        default_factory=dict,
        description="Merged over the rendered pod template. Kubernetes only. Default: empty.",
    )

    @model_validator(mode="after")
    def _weights_have_an_effect(self) -> Self:
        used = {self.policy, *self.shadows}
        if self.weights.bound is not None and "prefix-affinity" not in used:
            raise ValueError(_OF_AFFINITY)
        others = (self.weights.standstill, self.weights.tie_ratio, self.weights.tie_seconds)
        if any(weight is not None for weight in others) and not used & {"kvist", "approximate"}:
            raise ValueError(_OF_KVIST)
        return self
