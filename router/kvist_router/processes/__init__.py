"""The router as several processes: one that keeps the others, one mind, and relays that share a port.

    keeper (`kvist router`)     holds the listening sockets, reads the settings, adds the metrics up
      |-- mind                  replicas, feeds, tokens, decisions, admin port; a Unix socket for relays
      |-- relay 1..N            clients and engines; no index

`keeper.py` starts and ends them, `child.py` is what runs in them, `channel.py` what they say to each other,
`family.py` the metrics on their way. Relays inherit one listening socket, and the keeper has it too: what
waits to be accepted is lost by no relay's end, and the next free one takes it.
"""
