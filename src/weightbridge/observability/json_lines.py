"""Events as JSON, one line an event, and back."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import msgspec

from weightbridge.coordinator import session_events as e
from weightbridge.errors import UsageError

__all__ = ["JsonLines", "event_from_json", "event_to_json", "read_events"]

_MAX_LINE_BYTES = 1 << 20
_KINDS: Mapping[str, type[e.SessionEvent]] = {
    kind.__name__: kind
    for kind in (
        e.Joined, e.PhaseChanged, e.Probing, e.Planned, e.Connected, e.UpdateStarted, e.Progress, e.Installed,
        e.UpdateFinished, e.UpdateFailed, e.Superseded, e.EngineChanged, e.SessionEnded,
    )
}  # fmt: skip


def event_to_json(event: e.SessionEvent) -> bytes:
    """One object on one line, without the line's end: `event` names its class, then its fields; UpdateFinished has also
    `ratio`, achieved over ideal."""
    fields: dict[str, Any] = {"event": type(event).__name__}
    fields |= {f.name: getattr(event, f.name) for f in dataclasses.fields(event)}
    if isinstance(event, e.UpdateFinished):
        fields["ratio"] = event.ratio
    return msgspec.json.encode(fields)


def event_from_json(line: bytes | str) -> e.SessionEvent:
    """Inverse of event_to_json; fields it does not know are left out. Raises UsageError on anything that is no event."""
    try:
        fields = msgspec.json.decode(line, type=dict[str, Any])
        kind = _KINDS[fields.pop("event")]
        return msgspec.convert(fields, kind)
    except (msgspec.MsgspecError, KeyError, TypeError) as error:
        raise UsageError(f"not an event: {str(line)[:200]!r} ({error}); give lines that JsonLines wrote") from None


def read_events(path: Path | str) -> Iterator[e.SessionEvent]:
    """The events of a file that JsonLines wrote, in its order. Leaves out a last line without its end, which a process that was
    killed has left. Raises UsageError on any other line that is no event."""
    with Path(path).open("rb") as lines:
        for line in lines:
            if line.endswith(b"\n"):
                yield event_from_json(line)


def _whole_lines(file: BinaryIO) -> int:
    """Size of the file up to the end of its last whole line; of the last MiB only that much can be missing."""
    size = file.seek(0, os.SEEK_END)
    begin = file.seek(max(0, size - _MAX_LINE_BYTES))
    tail = file.read()
    end = tail.rfind(b"\n") + 1
    return begin + end if end or begin == 0 else size


class JsonLines:
    """Appends every event to a file, each line flushed as it is written: what was told is there when the process dies.

    For any number of threads; a context manager. After close events are left out. A file per process: lines of several
    processes on a network file system may get mixed.
    """

    def __init__(self, path: Path | str) -> None:
        """Opens the file for appending; a last line that a killed process has not finished goes. Raises UsageError when it
        cannot."""
        try:
            self._file = Path(path).open("a+b")  # noqa: SIM115 (closed by close)
            self._file.truncate(_whole_lines(self._file))
        except OSError as error:
            raise UsageError(f"events cannot be written to {str(path)!r}: {error.strerror or error}") from error
        self._lock = threading.Lock()

    def __call__(self, event: e.SessionEvent) -> None:
        line = event_to_json(event) + b"\n"
        with self._lock:
            if not self._file.closed:
                self._file.write(line)
                self._file.flush()

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            self._file.close()

    def __enter__(self) -> JsonLines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
