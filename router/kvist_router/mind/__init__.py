"""The mind: knows the replicas, decides, keeps the records. The relay asks it through `interface.Mind` only.

interface    what travels between relay and mind
mind         composes the parts below behind that interface
socket       the same interface over a Unix socket
replica      state of one replica: mirror, pending prefixes, outstanding work
mirror       a replica's cache index, from its feed
shared       what shared tiers hold, by the word of any replica
cost, choice what each replica would cost (pure), which one is taken (policies/)
records      decision records and the join with what really happened
"""
