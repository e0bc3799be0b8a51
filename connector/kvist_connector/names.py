"""The one place for ports, header names, paths, environment prefixes and metric names.

Every program of the wheel and docs/reference.md take them from here; a test
compares the two. Nothing here is configuration: defaults that a user may change
are fields of the settings classes and only *refer* to these constants.
"""

from typing import Final

API_VERSION: Final = "kvist.dev/v1alpha1"
KIND: Final = "CacheCluster"

# Default ports. `kvist up` adds the replica's ordinal to the per-replica ones.
PORT_ROUTER: Final = 8080
PORT_ROUTER_ADMIN: Final = 8081
PORT_ENGINE: Final = 8100
PORT_AGENT: Final = 8200
PORT_PEER: Final = 8300
PORT_ROUTER_NEIGHBOURS: Final = 8082
PORT_REDIS: Final = 6379
PORT_OPERATOR: Final = 8090

# Headers of a response through the router; inbound `x-kvist-*` headers are dropped.
HEADER_PREFIX: Final = "x-kvist-"
HEADER_REQUEST_ID: Final = "x-kvist-request-id"
HEADER_REPLICA: Final = "x-kvist-replica"
HEADER_PREDICTED_TOKENS: Final = "x-kvist-predicted-tokens"
HEADER_ROUTED_BY: Final = "x-kvist-routed-by"

# Environment variables: PREFIX + field name in upper case, nested fields joined by "__".
ENV_AGENT: Final = "KVIST_AGENT_"
ENV_ROUTER: Final = "KVIST_ROUTER_"
ENV_OPERATOR: Final = "KVIST_OPERATOR_"

# HTTP paths of the agent.
PATH_FEED: Final = "/v1/kvist/feed"
PATH_LOOKUP: Final = "/v1/kvist/lookup"
PATH_CLEAR: Final = "/v1/kvist/clear"
PATH_STATS: Final = "/v1/kvist/stats"
PATH_FLUSH: Final = "/v1/kvist/flush"
PATH_PIN: Final = "/v1/kvist/pin"
PATH_UNPIN: Final = "/v1/kvist/unpin"
PATH_PREFETCH: Final = "/v1/kvist/prefetch"
PATH_MOVE: Final = "/v1/kvist/move"
PATH_COMPRESS: Final = "/v1/kvist/compress"
PATH_DECOMPRESS: Final = "/v1/kvist/decompress"
PATH_OFFER: Final = "/v1/kvist/offer"
PATH_TAKE: Final = "/v1/kvist/take"
PATH_RELEASE: Final = "/v1/kvist/release"
PATH_RETIRE: Final = "/v1/kvist/retire"
PATH_RETIRED: Final = "/v1/kvist/retired"
PATH_DRAIN: Final = "/v1/kvist/drain"
PATH_DRAIN_ACKNOWLEDGE: Final = "/v1/kvist/drain/acknowledge"

# HTTP paths of an agent's peer port.
PATH_PEER_ASK: Final = "/v1/kvist/peer/ask"
PATH_PEER_CHUNKS: Final = "/v1/kvist/peer/chunks"
PATH_PEER_TAKE: Final = "/v1/kvist/peer/take"

# HTTP paths of the router's admin port.
PATH_DECISIONS: Final = "/v1/kvist/decisions"
PATH_REPLICAS: Final = "/v1/kvist/replicas"
PATH_EXPLAIN: Final = "/v1/kvist/explain"
PATH_POTENTIAL: Final = "/v1/kvist/potential"

# HTTP path of the router's port for other routers.
PATH_DISPATCHES: Final = "/v1/kvist/dispatches"

# HTTP paths every program has.
PATH_HEALTHZ: Final = "/healthz"
PATH_READYZ: Final = "/readyz"
PATH_METRICS: Final = "/metrics"

# Tags that the connector adds to the chunks of an adapter: the prefix, its name, and name@revision.
TAG_LORA: Final = "kvist.lora:"

# Metric label names. Values are bounded: no request id, no key, no prompt text.
LABEL_TIER: Final = "tier"
LABEL_REPLICA: Final = "replica"
LABEL_MODEL: Final = "model"
LABEL_TENANT: Final = "tenant"
LABEL_REASON: Final = "reason"
LABEL_OUTCOME: Final = "outcome"
LABEL_STATE: Final = "state"
LABEL_OPERATION: Final = "operation"

# Of every program's log, on standard error.
LOG_FORMAT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"
