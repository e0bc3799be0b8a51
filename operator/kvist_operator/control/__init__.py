"""The running operator: queue, lease, reconciliation, status. Only app.py puts the parts together."""
