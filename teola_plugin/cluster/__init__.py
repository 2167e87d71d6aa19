"""The shared pool: engines hosted once on Ray, used by many processes and apps. The only package that imports Ray.

`config` reads the pool's YAML; `deploy` starts and ends it; `client` and `shared_port` are what an app's process holds;
`engine_host` (one actor per engine, with its scheduler) and `instance_host` (one actor per instance) run in the
cluster; `wire` is what they say to one another.
"""
