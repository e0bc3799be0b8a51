"""Helpers for tests of tiers, agents and engine adapters.

chunk_store    conformance suite that every `ChunkStore` must pass
fake_engine    an engine's two halves without an engine, on a real agent's socket
agent_process  a real agent process with its HTTP API
whole_agent    an agent with its stores and HTTP API in this process
patience       long limits, but where a test is about them
ports          ports that stay free until a server is started on them
fault_proxy    a proxy before a real server that hangs, refuses, cuts or answers wrongly
"""
