"""Every touch of a framework's private names, one module for each framework.

LangChain, LlamaIndex and vLLM promise to keep their public names only. Some of what this package does cannot be done by
them alone. So all of it stands here, each name in a small function that says whose it is, since which version it is as
expected, and what happens where it is not there: the plain, slower way, or an error that says what to install. Nothing
else in this package may touch such a name; `tests/support/private_names.py` looks for it in the source.
"""
