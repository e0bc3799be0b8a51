"""Errors of the connector package, split by what the caller does next.

KvistError
  ConfigError         input is wrong: show the text to the user, exit 2
  UnsupportedError    layout, dtype, version or policy that is not understood: refuse to start
  IntegrityError      bytes do not match what was promised: drop the chunk, count, recompute
  StorageFull         no room: evict, or refuse the store; never fails a request
  TierError           a tier failed (I/O, network, deadline): count, treat as a miss, breaker
  AgentGone           the agent's socket is closed: go on uncached, reconnect
"""


class KvistError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(KvistError):
    """A setting is wrong; the text names field, value and what is valid."""


class UnsupportedError(KvistError):
    """Something of the engine is not understood; the text says what and the remedy."""


class IntegrityError(KvistError):
    """Stored bytes are not what was written."""


class StorageFull(KvistError):  # noqa: N818 - a state, not a fault
    """A tier has no room for the bytes."""


class TierError(KvistError):
    """A tier could not answer."""


class AgentGone(KvistError):  # noqa: N818 - a state, not a fault
    """The agent cannot be reached."""
