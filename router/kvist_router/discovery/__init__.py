"""Where the list of replicas comes from: `static` settings, a `file` that is read again when it changes.

A source is an async iterator of whole lists; mind/fleet.py compares each with what it has.
"""
