"""The contract of engines as tests: `EngineConformance`, and for a store `StoreConformance`."""

from teola_plugin.engines.conformance.engine import EngineConformance, collect, ends
from teola_plugin.engines.conformance.store import StoreConformance

__all__ = ["EngineConformance", "StoreConformance", "collect", "ends"]
