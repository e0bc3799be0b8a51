"""Who sends a request: API keys, and the tenant that each belongs to.

settings  what can be told about keys and tenants
keys      files of hashed keys
door      the check of a request's headers
"""
