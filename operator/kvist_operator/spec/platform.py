"""Sections `security` and `monitoring`: what surrounds the programs on Kubernetes."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from kvist_operator.spec.base import Duration, Items, Name, Overlay, SecretRef, Section, rules

Peers = Annotated[Items[Overlay], Field(max_length=32)]


class NetworkPolicy(Section):
    """Which connections the cluster's pods accept and make."""

    model_config = rules(
        (
            "!has(self.egressTo) || self.egressTo.size() == 0 || (has(self.egress) && self.egress)",
            "egressTo has no effect without egress: true",
        ),
    )

    enabled: bool = Field(
        default=True, description="Render ingress rules from the port table. Default: true."
    )
    egress: bool = Field(default=False, description="Restrict outgoing connections too. Default: false.")
    clients: Peers = Field(
        default=(), description="NetworkPolicyPeers that may send requests to the router. Default: everyone."
    )
    metrics_from: Peers = Field(
        default=(),
        description="NetworkPolicyPeers that may scrape metrics. Default: pods with the label "
        "app.kubernetes.io/name: prometheus in any namespace.",
    )
    egress_to: Peers = Field(
        default=(),
        description="NetworkPolicyPeers that engines and routers may reach too when egress is restricted: "
        "model hub, external Redis, object store. Default: none.",
    )


class AgentTls(Section):
    """Certificate of all agents and routers of the cluster, and its CA; they may change while pods run."""

    certificate: SecretRef = Field(
        description="Secret with the certificate and its chain, PEM, for the DNS name kvist-agent: tls.crt."
    )
    private_key: SecretRef = Field(description="Secret with its key, PEM: tls.key.")
    ca: SecretRef = Field(description="Secret with the CAs that sign it, PEM: ca.crt.")


class Security(Section):
    """Tokens, accounts, network. Kubernetes only."""

    token: SecretRef | None = Field(
        default=None, description="Secret with the token of the controls. Default: one made by the operator."
    )
    agent_tls: AgentTls | None = Field(
        default=None,
        description="TLS from routers to agents and between agents, with certificates on both sides. "
        "Default: none, HTTP with the token.",
    )
    service_account_name: Name | None = Field(
        default=None, description="Service account of engines and routers. Default: one without rights."
    )
    network_policy: NetworkPolicy = Field(
        default_factory=NetworkPolicy, description="Ingress is restricted by default, egress on request."
    )


class Monitoring(Section):
    """Objects for Prometheus and Grafana, rendered where those kinds exist. Kubernetes only."""

    pod_monitor: bool = Field(default=True, description="Render a PodMonitor. Default: true.")
    prometheus_rule: bool = Field(default=True, description="Render alert rules. Default: true.")
    dashboard: bool = Field(default=True, description="Render a dashboard ConfigMap. Default: true.")
    scrape_interval: Duration = Field(default=15.0, gt=0, description="Time between scrapes. Default: 15s.")
