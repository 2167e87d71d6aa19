"""Calls of the user's own objects that the framework's sync code makes one after the other, begun together."""
