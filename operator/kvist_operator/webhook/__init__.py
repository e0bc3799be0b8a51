"""The validating webhook: advice on CacheClusters, over TLS with certificates that renew themselves.

Optional, and never in the way: CEL rules of the CRD enforce, and when nothing answers here objects are
admitted as they are. `judge.py` and `rotation.py` decide, `server.py` and `keeper.py` act.
"""
