"""Entry point of every trainer and engine process: `worker CONFIG_FILE WORKER_NAME CHANNEL_FD`."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import NoReturn

from weightbridge.cli.demo.config import DemoConfig
from weightbridge.cli.demo.messages import Channel, Failed, Phase
from weightbridge.errors import UsageError

__all__ = ["main"]

_STAY_SECONDS = 120.0
_ENGINE_NICENESS = 10


def main() -> NoReturn:
    """Run one worker and tell the launcher how it ended.

    A worker that failed stays until the launcher has heard everybody: were it to leave at once, its peers would name
    it in place of the worker that really died.
    """
    config = DemoConfig.read(Path(sys.argv[1]))
    name = sys.argv[2]
    channel = Channel(int(sys.argv[3]))
    try:
        channel.send(Phase(text="starting"))
        _run(config, name, channel)
    except BaseException as error:
        traceback.print_exc()
        channel.send(_failure(error))
        channel.wait_for_stop(_STAY_SECONDS)
        _leave(1)
    _leave(0)


def _leave(status: int) -> NoReturn:
    """End without the interpreter's own shutdown: it takes seconds in a process full of torch, and after a failure it
    would wait for threads and groups that wait for a dead peer.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _run(config: DemoConfig, name: str, channel: Channel) -> None:
    side, _, rank = name.rpartition("/")
    if side == "trainer":
        from weightbridge.cli.demo.trainer import run_trainer

        run_trainer(config, int(rank), channel)
    else:
        os.nice(_ENGINE_NICENESS)  # decoding gives way to training where they share cores
        from weightbridge.cli.demo.engine import run_engine

        run_engine(config, side, int(rank), channel)


def _failure(error: BaseException) -> Failed:
    causes = getattr(error, "causes", None) or {}
    return Failed(
        kind=type(error).__name__,
        text=str(error) or type(error).__name__,
        causes={str(worker): str(cause) for worker, cause in causes.items()},
        traceback="".join(traceback.format_exception(error)),
        usage=isinstance(error, UsageError),
    )


if __name__ == "__main__":
    main()
