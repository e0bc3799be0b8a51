"""The relay: plain ASGI between client and engine. Holds no index; asks the mind.

app       the ASGI application of the hot paths
body      reading a request's body within its limits
upstream  one attempt at an engine
headers   which headers pass
edits     the closed list of changes to a body
answers   errors in OpenAI's form
"""
