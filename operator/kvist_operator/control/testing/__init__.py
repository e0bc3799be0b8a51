"""Stand-ins for the API server, checked against the real one by the same suite."""
