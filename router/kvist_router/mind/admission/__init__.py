"""Who may be sent to a replica now: rates of tenants, and the queue in which requests wait their turn.

rates      token buckets of requests and tokens
fair       the order: priorities, then deficit round robin over tokens
gate       both of them around the requests that are under way
"""
