"""A one-node Kubernetes of real parts on this machine, for the tests in e2e/tests. Standard library only."""
