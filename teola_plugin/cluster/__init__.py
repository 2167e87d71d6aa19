"""The shared pool: engines hosted once on Ray, used by many processes and apps. The only package that imports Ray.

`config` reads the pool's YAML; `deploy` starts and ends it, with what is in `deployment`; `client` is what an app's
process holds; `host` runs in the cluster: one actor per engine with its scheduler, and one per instance; `wire` is what
they say to one another.
"""
