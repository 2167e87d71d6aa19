"""The shared pool in the cluster: the actor of an engine with its scheduler, and the actors of its replicas."""
