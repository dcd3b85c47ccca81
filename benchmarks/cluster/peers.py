"""Other projects' own code as methods: whether it can be run here, and where it is.

Such a package is installed in an environment of its own; workers find it at the end of their path, so that what both
have comes from the library's own environment.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

__all__ = ["PEERS", "missing", "settings", "use"]

PEERS = {"peer:mooncake": ("mooncake.engine", ".venvs/transports", "make .venvs/transports/.installed")}
"""Method -> module, environment, and what makes it."""

_ROOT = Path(__file__).parents[2]
_SETTINGS = {
    # Its own guide's advice for many transfers; without it each write makes a connection.
    "MC_TCP_ENABLE_CONNECTION_POOL": "1",
    "MC_LOG_LEVEL": "ERROR",
    "GLOG_minloglevel": "2",
}


def settings() -> dict[str, str]:
    """Environment variables for workers that run a peer; what the user has set stays."""
    return {name: os.environ.get(name, value) for name, value in _SETTINGS.items()}


def use(method: str) -> None:
    """Make a peer's module importable in this process."""
    _, environment, _ = PEERS[method]
    sys.path.append(str(_site(environment)))


def missing(method: str) -> str:
    """Why a peer cannot be run here, in one line; "" when it can. Asks another process: an import starts threads."""
    module, environment, how = PEERS[method]
    program = f"import sys; sys.path.append({str(_site(environment))!r}); import {module}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    if done.returncode == 0:
        return ""
    last = (done.stderr.strip().splitlines() or ["no word"])[-1]
    return f"{last}; {how}"


def _site(environment: str) -> Path:
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return _ROOT / environment / "lib" / version / "site-packages"
