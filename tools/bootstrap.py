#!/usr/bin/env python3
"""Make the virtual environment that the Makefile's targets run in.

Standard library only, so any Python >= 3.8 can run it on a fresh machine. Three flavours, one lock file each:

* cpu   requirements/cpu.lock; torch is left out of the lock and comes from the first of: a local wheel folder
        (PIP_FIND_LINKS, UV_FIND_LINKS or ./wheels), the PyTorch CPU index, the package index's CUDA build.
* cuda  requirements/cuda.lock, torch and the CUDA build of vLLM included; chosen when nvidia-smi lists a GPU.
* oldest  requirements/oldest.lock: the oldest supported version of each package, on the oldest supported Python,
          without torch and engines. `make test-oldest` runs in it.

Environment: TEOLA_FLAVOUR=cpu|cuda|oldest, TEOLA_PYTHON=/path/to/python, TEOLA_TORCH=auto|cpu|pypi|<index url>,
TEOLA_TORCH_INDEX=<url of a PyTorch CPU index>.
"""

from __future__ import annotations

import glob
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from typing import NoReturn

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TORCH, UV = "2.13.0", "0.13.8"
OLDEST, NEWEST = (3, 11), (3, 13)
DISK_GB = {"cpu": 5, "cuda": 14, "oldest": 1}
CPU_INDEX = os.environ.get("TEOLA_TORCH_INDEX", "https://download.pytorch.org/whl/cpu").rstrip("/")


def die(message: str) -> NoReturn:
    sys.exit("setup: " + message)


def say(message: str) -> None:
    print("setup: " + message, flush=True)


def python_version(exe: str) -> tuple[int, int] | None:
    """(major, minor) of a 64-bit Python with venv and ensurepip, else None."""
    code = "import sys, ensurepip, venv; assert sys.maxsize > 2**32; print(*sys.version_info[:2])"
    try:
        out = subprocess.run([exe, "-c", code], capture_output=True, text=True, timeout=30)
        major, minor = map(int, out.stdout.split())
        return (major, minor) if out.returncode == 0 else None
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None


def wheel_folders() -> list[str]:
    named = " ".join(os.environ.get(k, "") for k in ("UV_FIND_LINKS", "PIP_FIND_LINKS"))
    return [d for d in [*named.replace(",", " ").split(), os.path.join(ROOT, "wheels")] if os.path.isdir(d)]


def local_torch(version: tuple[int, int]) -> str | None:
    pattern = "torch-%s+cpu-cp%d%d-*x86_64.whl" % (TORCH, *version)
    hits = [hit for d in wheel_folders() for hit in glob.glob(os.path.join(glob.escape(d), pattern))]
    return hits[0] if hits else None


def reachable(url: str) -> bool:
    try:
        urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=5).close()
        return True
    except Exception:
        return False


def candidate_pythons() -> list[str]:
    if os.environ.get("TEOLA_PYTHON"):
        return [os.environ["TEOLA_PYTHON"]]
    names = [sys.executable, "python3.11", "python3.12", "python3.13", "python3", "/usr/bin/python3"]
    pyenv = os.environ.get("PYENV_ROOT", os.path.expanduser("~/.pyenv"))
    found = [p for p in map(shutil.which, names) if p]
    found += sorted(glob.glob(os.path.join(pyenv, "versions", "3.1[123].*", "bin", "python3")))
    return list(dict.fromkeys(found))


def pick_python(flavour: str) -> tuple[str, tuple[int, int]]:
    seen = [(exe, python_version(exe)) for exe in candidate_pythons()]
    newest = OLDEST if flavour == "oldest" else NEWEST
    good = [(exe, v) for exe, v in seen if v and OLDEST <= v <= newest]
    if not good:
        listed = ", ".join("%s (%s)" % (e, "%d.%d" % v if v else "no venv module") for e, v in seen) or "none"
        die(
            "needs Python %d.%d to %d.%d with the venv module; found: %s.\n"
            "  Debian or Ubuntu: apt-get install python3.11 python3.11-venv; or set TEOLA_PYTHON=/path/to/python3.11"
            % (OLDEST + newest + (listed,))
        )
    fitting = [(e, v) for e, v in good if flavour == "cpu" and local_torch(v)]
    return (fitting or good)[0]


def pick_flavour() -> str:
    wanted = os.environ.get("TEOLA_FLAVOUR", "auto")
    if wanted in DISK_GB:
        return wanted
    if wanted != "auto":
        die("TEOLA_FLAVOUR is %r; use cpu, cuda, oldest or auto" % wanted)
    smi = shutil.which("nvidia-smi")
    try:
        listed = smi and subprocess.run([smi, "-L"], capture_output=True, text=True, timeout=30)
        return "cuda" if listed and listed.returncode == 0 and "GPU " in listed.stdout else "cpu"
    except (OSError, subprocess.TimeoutExpired):
        return "cpu"


def torch_source(version: tuple[int, int]) -> tuple[str, list[str]]:
    """(where from, in words; arguments for `uv pip install`)"""
    wanted = os.environ.get("TEOLA_TORCH", "auto")
    wheel = local_torch(version)
    if wanted in ("auto", "cpu") and wheel:
        return "local wheel", ["--no-deps", wheel]
    if wanted.startswith("http"):
        return wanted, ["--index", wanted, "--index-strategy", "unsafe-best-match", "torch==" + TORCH]
    if wanted in ("auto", "cpu") and reachable(CPU_INDEX + "/torch/"):
        return CPU_INDEX, ["--no-deps", "--index", CPU_INDEX, "torch==%s+cpu" % TORCH]
    if wanted == "cpu":
        die(
            "no CPU build of torch %s for Python %d.%d: %s is unreachable and no wheel lies in %s.\n"
            "  Put torch-%s+cpu-cp%d%d-*.whl in ./wheels, use a Python that fits a wheel you have, "
            "or set TEOLA_TORCH=pypi" % (TORCH, *version, CPU_INDEX, wheel_folders() or "./wheels", TORCH, *version)
        )
    return "the package index (CUDA build, about 2.5 GB more)", ["torch==" + TORCH]


def uv_environment() -> dict[str, str]:
    env = {
        k: v
        for k, v in os.environ.items()
        if k not in ("UV_FIND_LINKS", "PYTHONDONTWRITEBYTECODE", "VIRTUAL_ENV", "PYTHONPATH")
    }
    env.setdefault("UV_HTTP_TIMEOUT", "180")
    env.setdefault("UV_SYSTEM_CERTS", "1")  # trust the machine's CA store (company proxies); harmless elsewhere
    env.setdefault("UV_LINK_MODE", "copy")
    return env


def install(venv: str, flavour: str, torch_args: list[str]) -> None:
    vpy = os.path.join(venv, "bin", "python")
    env = uv_environment()

    def run(*command: str) -> None:
        if subprocess.run(command, env=env).returncode:
            die("this command failed; fix what it says above and run make again:\n  " + " ".join(command))

    if subprocess.run([vpy, "-m", "uv", "--version"], capture_output=True).returncode:
        run(vpy, "-m", "pip", "install", "-q", "--disable-pip-version-check", "uv==" + UV)
    # --compile-bytecode: without it every run of vLLM compiles a few thousand modules anew where the
    # environment forbids writing bytecode.
    pip = [vpy, "-m", "uv", "pip", "install", "-q", "--no-config", "--python", vpy, "--compile-bytecode"]
    if torch_args:
        run(*pip, *torch_args)
    run(*pip, "--no-deps", "--require-hashes", "-r", os.path.join("requirements", flavour + ".lock"))
    if flavour == "oldest":  # its packages are too old to build with
        run(*pip, "--no-deps", "--editable", ".")
        run(vpy, "-c", "import teola_plugin")
        return
    run(*pip, "--no-deps", "--no-build-isolation", "--editable", ".")
    run(vpy, "-c", "import torch, teola_plugin")


def main() -> None:
    started = time.time()
    os.chdir(ROOT)
    venv = sys.argv[1] if len(sys.argv) > 1 else ".venv"
    if not sys.platform.startswith("linux") or os.uname().machine != "x86_64":
        die("the lock files are for Linux on x86-64; elsewhere: pip install -e '.[langchain]' (wrapped engines only)")
    flavour = pick_flavour()
    exe, version = pick_python(flavour)
    sources = {"cuda": "requirements/cuda.lock", "oldest": "nowhere (not needed)"}
    where, torch_args = (sources[flavour], []) if flavour in sources else torch_source(version)
    need = DISK_GB["cuda" if "CUDA" in where else flavour]
    free = shutil.disk_usage(ROOT).free / 2**30
    if free < need:
        die("needs %d GB of free disk, %.1f GB are free" % (need, free))
    say("Python %d.%d, %s build, torch from %s" % (*version, flavour, where))
    if python_version(os.path.join(venv, "bin", "python")) != version:
        shutil.rmtree(venv, ignore_errors=True)
        subprocess.check_call([exe, "-m", "venv", venv])
    install(venv, flavour, torch_args)
    with open(os.path.join(venv, ".ready"), "w") as f:
        f.write("%s, torch from %s\n" % (flavour, where))
    say("ready in %.0f s" % (time.time() - started))


if __name__ == "__main__":
    if sys.version_info < (3, 8):
        sys.exit("setup: tools/bootstrap.py needs Python 3.8 or newer; this is " + sys.version.split()[0])
    main()
