"""The cache layer of Kvist: keys, wire protocol, arena, agent, tiers and engine adapters."""

__version__ = "0.1.0"
