"""From a plan to what runs it: local processes, Kubernetes objects."""
