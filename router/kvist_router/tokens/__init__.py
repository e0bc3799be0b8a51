"""From a request body to the tokens the engine will see, and their keys.

request     body -> typed request, or a refusal
template    chat template -> text
segments    text -> tokens, through a cache of pieces between added tokens
tokenizer   both, for one model folder
remote      an engine's /tokenize, where the local way is not exact
keys        tokens -> chunk keys, through a memo
"""
