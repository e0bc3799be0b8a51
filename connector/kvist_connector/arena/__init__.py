"""The arena file, as agent and workers both see it. Torch-free.

geometry   offsets of superblock, slot headers and regions
headers    reading and writing slot headers in a mapping
locks      a worker's life, visible to the agent without a connection
"""
