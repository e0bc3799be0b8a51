"""Tiers below memory. Torch-free.

base       the `ChunkStore` contract that every backend implements
envelope   header, checksum and identity around the bytes of any store
header     what a stored chunk says about itself
coding     chunks compressed (compression, gain) and encrypted (encryption)
disk       files in a folder
redis      values in a Redis server
object_store objects in S3 and its like
spread     several stores as one
metered    counts and times the operations of any store
deadline   time limit and breaker for any store
pieces     copies that do not hold the loop
faulty     injects failures, for tests
"""
