"""Stand-ins for tests and benches: an engine and an agent's feed on real sockets. Never used in service."""
