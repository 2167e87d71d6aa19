"""Python's collector in tests: what is garbage is collected where a test asks for it, and that costs little."""

from __future__ import annotations

import gc


def keep() -> None:
    """What is there now is not looked through by later collections: of all that the suite imports, each takes a second.

    Not taken back: the collection after that would be a full one. What is garbage already is looked for again at the
    end of the session, see `tests/conftest.py`.
    """
    gc.collect(1)
    gc.freeze()
