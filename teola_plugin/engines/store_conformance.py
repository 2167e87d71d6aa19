"""`engines.conformance.store`, by the name that it had first."""

from teola_plugin.engines.conformance.store import StoreConformance

__all__ = ["StoreConformance"]
