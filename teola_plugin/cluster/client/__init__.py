"""The shared pool in an app's process: a port for each engine, over a line to the engine's host."""
