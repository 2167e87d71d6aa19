"""Chains of LangChain: a chain stays a Runnable, and its engines run ahead."""

from __future__ import annotations

from teola_plugin.shims import require

require("langchain-core")
