"""The pool as a service: OpenAI's protocol on its engines and on apps, queries as resources. See docs/server.md.

Rooms: `settings` (the YAML), `access` (keys, terms, limits, admission), `models` (what answers: engines, apps), `wire`
(the protocol's bodies), `routes` (addresses), `service` (what all of them share), `run` (the process).
`access.keys` needs nothing beyond the base, `client` httpx, everything else the extra `server`.
"""
