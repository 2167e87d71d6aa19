"""The shared pool: engines hosted once on Ray, used by many processes and apps. The only package that imports Ray.

`config` reads the pool's YAML; `deploy` starts and ends it, with the modules in `deployment`; `client` is the side of
an app's process; `host` runs in the cluster: one actor per engine with its scheduler, and one per replica; `wire`
holds their messages.
"""
