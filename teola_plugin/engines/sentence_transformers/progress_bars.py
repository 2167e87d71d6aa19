"""Loading a model without the bars of its library; ours are in `observe.progress`."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_one = threading.Lock()


@contextmanager
def no_loading_bars() -> Iterator[None]:
    """Hides transformers' bars inside the block, for the whole process; blocks take turns."""
    from transformers.utils import logging

    with _one:
        shown = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()
        try:
            yield
        finally:
            if shown:
                logging.enable_progress_bar()
