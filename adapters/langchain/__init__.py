"""Chains of LangChain: a chain stays a Runnable, and its engines run ahead."""

from __future__ import annotations

from teola_plugin.errors import require_modules
from teola_plugin.shims import require

require_modules("LangChain support", ("langchain_core",), "langchain")
require("langchain-core")
