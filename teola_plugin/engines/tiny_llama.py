"""`engines.bundled.llama`, by the name that it had first."""

from teola_plugin.engines.bundled.llama import Shape, default_folder, make

__all__ = ["Shape", "default_folder", "make"]
