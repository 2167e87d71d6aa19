"""Records of the pools that `teola up` started on this machine, so that other commands and apps find them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from teola_plugin.engines.model_cache import cache_folder

ADDRESS = "TEOLA_ADDRESS"
"""Environment variable with the cluster to connect to when none is named."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, slots=True)
class DeploymentRecord:
    """A pool that `up` started on this machine."""

    name: str
    address: str
    pid: int = 0
    """Process that holds the Ray node; 0 for a cluster that existed before."""
    token: str = ""
    """File with the token that its Ray cluster asks for; empty if `up` made none."""

    @staticmethod
    def path(name: str) -> Path:
        return folder() / f"{name}.json"

    @classmethod
    def read(cls, name: str) -> DeploymentRecord | None:
        return cls._of(cls.path(name))

    @classmethod
    def _of(cls, path: Path) -> DeploymentRecord | None:
        """Return the record in a file; None if the file is missing or not a valid record."""
        try:
            return cls(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            return None

    @classmethod
    def every(cls) -> Iterator[DeploymentRecord]:
        """Yield the records in the folder of records, by file name; skip files that hold no valid record."""
        for path in sorted(folder().glob("*.json")):
            if (record := cls._of(path)) is not None:
                yield record

    def write(self) -> None:
        """Write the record as JSON to its file, in place of an earlier one of that name.

        The folder is made if it is missing. Raises OSError if the file cannot be written.
        """
        path = self.path(self.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self)) + "\n")

    def forget(self) -> None:
        """Delete the record's file, and that of its token if it has one. Do nothing where a file is gone already."""
        self.path(self.name).unlink(missing_ok=True)
        if self.token:
            Path(self.token).unlink(missing_ok=True)


def folder() -> Path:
    return cache_folder() / "pools"


def address_of(pool: str, address: str | None = None) -> str | None:
    """Return the given address, or that of the pool if it was started on this machine; None if neither is known.

    If `TEOLA_ADDRESS` is set, no record is read and `address` is returned as it is, even if it is None.
    """
    if address or os.environ.get(ADDRESS):
        return address
    record = DeploymentRecord.read(pool)
    return record.address if record is not None else None


def plain(address: str) -> str:
    """Return `host:port` with one name for this machine's loopback."""
    host, _, port = address.rpartition(":")
    return f"127.0.0.1:{port}" if host in LOOPBACK else address


def token_of(address: str) -> str:
    """Return the token file of the cluster at this address if a pool of this machine has one there, else ""."""
    plain_address = plain(address)
    return next(
        (
            record.token
            for record in DeploymentRecord.every()
            if plain(record.address) == plain_address and record.token
        ),
        "",
    )
