"""Tiers below memory. Torch-free.

base       the `ChunkStore` contract that every backend implements
envelope   header, checksum and identity around the bytes of any store
disk       files in a folder
metered    counts and times the operations of any store
deadline   time limit and breaker for any store
faulty     injects failures, for tests
"""
