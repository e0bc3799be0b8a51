"""The typed `CacheCluster`, one source for CRD, operator and `kvist up`. Imports no Kubernetes code."""

from kvist_operator.spec.cluster import CacheCluster, Metadata, Spec, dump, load, loads, parse

__all__ = ["CacheCluster", "Metadata", "Spec", "dump", "load", "loads", "parse"]
