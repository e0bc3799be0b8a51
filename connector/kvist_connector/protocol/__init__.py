"""What travels between engine, agent and router. Torch-free, no I/O.

framing   length-prefixed msgpack frames, the same on the socket and in the feed
engine    engine (scheduler half, workers) <-> agent, over a Unix socket
feed      agent -> routers, one HTTP stream per reader
tiers     the tier numbers both speak of
"""
