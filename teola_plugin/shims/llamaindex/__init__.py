"""LlamaIndex's private names: what its objects are made of, its code run on copies, overridden methods.

Written for `llama-index-core` 0.14. What an installed version does not have is an `Unreadable` at the reader.
"""
