"""The three clusters of the demo, alike in all but what is compared. Pure.

`round_robin` is plain vLLM: no connector, no agent. `routing` has both, with nothing to keep chunks
in, so that only the choice of the replica differs. `kvist` is the product.
"""

from __future__ import annotations

from typing import Any, Final

from kvist_cli.models import DEMO_MODEL
from kvist_operator import spec

SERVED_NAME: Final = "demo"
MODES: Final = ("round_robin", "routing", "kvist")
TITLES: Final = {
    "round_robin": "vLLM, round robin",
    "routing": "Kvist routing alone",
    "kvist": "Kvist",
}
REPLICAS: Final = 2
# One session fits, or two short ones; all of them, dealt out to the engines, do not.
KV_SPACE: Final = "76Mi"
MAX_MODEL_LEN: Final = 3328
MEMORY: Final = "1Gi"
DISK: Final = "4Gi"

CACHES: Final[dict[str, dict[str, Any]]] = {
    "round_robin": {"enabled": False},
    "routing": {"memory": 0},
    "kvist": {"memory": MEMORY, "disk": {"size": DISK}},
}
POLICIES: Final = {"round_robin": "round-robin", "routing": "kvist", "kvist": "kvist"}


def manifest(mode: str, model: str = DEMO_MODEL) -> spec.CacheCluster:
    """The cluster of one mode. The engine's own reset of its prefix cache is for the exactness check."""
    return spec.parse(
        {
            "apiVersion": "kvist.dev/v1alpha1",
            "kind": "CacheCluster",
            "metadata": {"name": f"demo-{mode.replace('_', '-')}"},
            "spec": {
                "model": {"name": model, "servedName": SERVED_NAME},
                "engine": {
                    "replicas": REPLICAS,
                    "dtype": "bfloat16",
                    "maxModelLen": MAX_MODEL_LEN,
                    "kvCacheMemory": KV_SPACE,
                    "extraArgs": ["--enable-prompt-tokens-details"],
                    "env": [{"name": "VLLM_SERVER_DEV_MODE", "value": "1"}],
                },
                "cache": CACHES[mode],
                "router": {"policy": POLICIES[mode]},
            },
        }
    )
