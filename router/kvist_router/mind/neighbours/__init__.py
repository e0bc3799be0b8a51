"""Several routers of one cluster tell each other what they have sent, so that they do not pile on one engine.

    router A                            router B
      |  <-- GET /v1/kvist/dispatches --  |   each reads every other one's stream
      |  --- Opening -----------------> |
      |  --- Dispatched, Prefilled, Ended, Beat ->

`publisher.py` says it, `server.py` serves it, `reader.py` follows one address, `circle.py` finds all of them,
`known.py` applies what is heard. A stream may be lost at any time: what it said is taken back then, and costs
that are further apart count as equal (`choice.tie_band`).
"""
