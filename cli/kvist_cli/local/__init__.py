"""A cluster of local processes, as `kvist up` runs it. For Python callers:

cluster = Cluster.up(spec.load(path), Options(), on_event=print)
try:
    cluster.urls.router, cluster.urls.engines["replica-0"], cluster.urls.agents["replica-0"]
    cluster.kill("engine-0"); cluster.wait_ready("engine-0", deadline=300)
    cluster.restart("agent-0")
finally:
    cluster.down(flush=True)
"""

from kvist_cli.local.cluster import Cluster, ClusterError, Urls
from kvist_cli.local.events import Event, EventKind
from kvist_cli.local.options import Options, Ports

__all__ = ["Cluster", "ClusterError", "Event", "EventKind", "Options", "Ports", "Urls"]
