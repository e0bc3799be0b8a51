"""Helpers for tests of tiers, agents and engine adapters.

chunk_store    conformance suite that every `ChunkStore` must pass
fake_engine    an engine's two halves without an engine, on a real agent's socket
agent_process  a real agent process with its HTTP API
"""
