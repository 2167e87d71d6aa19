"""The pool as a service: OpenAI's protocol on its engines and on apps, queries as resources. See docs/server.md.

`settings` holds the YAML; `keys`, `callers` and `admission` decide who may ask, and how much; `models` answer: engines
and apps; `wire` has the protocol's bodies, `routes` its addresses, `queries` and `documents` what is kept; `service` is
what all routes share, `app` the ASGI app, `run` the process. `keys` needs nothing beyond the base, `client` httpx,
everything else the extra `server`.
"""
