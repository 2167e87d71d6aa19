"""Whether packages can be imported, tried in a process of its own: some take long, some take the process with them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

_MARK = "\x1e"
"""Before each line of ours: packages print what they like."""
_SECONDS = 240.0
_CHILD = """
import importlib, json, sys
mark, path, names = json.loads(sys.argv[1])
sys.path[:] = path
def say(name, **found):
    print(mark + json.dumps([name, found]), flush=True)
for name in names:
    say(name, begun=True)
    try:
        module = importlib.import_module(name)
        found = {}
        if name == "torch":
            cuda, gpus = module.version.cuda, []
            for i in range(module.cuda.device_count()):
                free, total = module.cuda.mem_get_info(i)
                gpus.append({"name": module.cuda.get_device_name(i), "free": free, "total": total})
            found = {"cuda": cuda, "gpus": gpus}
        say(name, **found)
    except BaseException as error:
        say(name, error=f"{type(error).__name__}: {error}")
"""


@dataclass(frozen=True, slots=True)
class Imported:
    """The result of importing a module."""

    error: str = ""
    found: dict[str, Any] = field(default_factory=dict)
    """Of torch: `cuda` (the version it is built for, or None) and `gpus` (name, free and total bytes of each)."""


def imported(modules: Sequence[str], seconds: float = _SECONDS) -> dict[str, Imported]:
    """Import each of the modules; `seconds` is the time that all together may take."""
    found: dict[str, Imported] = {}
    while left := [name for name in modules if name not in found]:
        said, how = _child(left, seconds)
        found |= said
        if left[0] not in found:  # it could not even begin: nothing will
            return found | {name: Imported(how) for name in left}
    return found


def _child(names: Sequence[str], seconds: float) -> tuple[dict[str, Imported], str]:
    """Import the modules in a child process. Return the results by module, and how the process ended.

    A module whose import ended the process has that end as its error.
    """
    given = json.dumps([_MARK, sys.path, list(names)])
    try:
        ran = subprocess.run(
            [sys.executable, "-c", _CHILD, given], capture_output=True, text=True, errors="replace", timeout=seconds
        )
        output, how = ran.stdout, f"the process ended with status {ran.returncode}: {ran.stderr.strip()[-300:]}"
    except subprocess.TimeoutExpired as error:
        output = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else error.stdout or ""
        how = f"it took longer than {seconds:.0f} s"
    said = {}
    for line in output.split("\n"):  # splitlines() would split at the mark as well
        if _MARK in line:
            name, told = json.loads(line.partition(_MARK)[2])
            unfinished = told.pop("begun", False)
            said[name] = Imported(how if unfinished else told.pop("error", ""), told)
    return said, how
