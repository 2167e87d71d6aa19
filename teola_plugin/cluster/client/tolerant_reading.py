"""Parcels with news of which this process cannot read all: what it can read is not lost with the rest.

A chunk that another app has stored, say, with metadata of a class that only that app has.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

from teola_plugin.cluster.remote_values import collecting_refs
from teola_plugin.cluster.wire import Parcel, RequestEvent, sendable, unpack


def read_parcel(parcel: Parcel, engine: str) -> tuple[int, list[RequestEvent]]:
    """The number of a parcel and its news; those that hold something unknown are ends that say so."""
    try:
        number, *news = unpack(parcel)
    except (ImportError, AttributeError):
        number, *found = _unpack_tolerantly(parcel)
        news = [sendable(engine, one) for one in found]
    return number, news


def _unpack_tolerantly(parcel: Parcel) -> list[Any]:
    body, refs = parcel if isinstance(parcel, tuple) else (parcel, [])
    with collecting_refs(refs):
        found: list[Any] = _Reader(io.BytesIO(body)).load()
    return found


class _Reader(pickle.Unpickler):
    """Puts something in the place of what cannot be imported; it cannot be pickled again, and so is found."""

    def find_class(self, module: str, name: str) -> Any:
        try:
            return super().find_class(module, name)
        except (ImportError, AttributeError):
            return type(name, (_Unknown,), {"__module__": module})


class _Unknown:
    def __new__(cls, *_: Any, **__: Any) -> _Unknown:
        return object.__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __setstate__(self, _: Any) -> None: ...

    def __setitem__(self, _: Any, __: Any) -> None: ...

    def append(self, _: Any) -> None: ...

    def __reduce_ex__(self, _: Any) -> Any:
        raise pickle.PicklingError(f"{type(self).__module__}.{type(self).__name__} cannot be imported in this process")
