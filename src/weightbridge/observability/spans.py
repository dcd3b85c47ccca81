"""From what Options(observe=...) tells to spans: how long each pack, post, decode and assembly of a worker took."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from weightbridge.executor.observation import KernelRan, Observation, Prepared
from weightbridge.machine import events as m
from weightbridge.program.program import Round

__all__ = ["LANES", "Recorder", "Span", "SpanMaker"]

LANES = ("pack", "post", "arrive", "decode", "assemble", "signal")
"""What a span can be of. An arrival (of bytes) and a signal (a tag without) have no length."""


class Span(NamedTuple):
    """lane: one of LANES. begin, end: time.monotonic. peer: whom a post went to, as "NAME (STAGE)", or from whom
    something came, as "NAME KIND"; "" for kernels. nbytes: of a post, else 0."""

    lane: str
    round: int
    begin: float
    end: float
    nbytes: int
    peer: str


class SpanMaker:
    """Of one worker. `see` is told each observation in turn and answers with the span that it completes."""

    def __init__(self) -> None:
        self._rounds: Sequence[Round] = ()
        self._names: list[str] = []
        self._posted: dict[tuple[int, str, int], tuple[float, int]] = {}  # (round, stage, peer) -> when, bytes

    def see(self, seen: Observation) -> Span | None:
        match seen.what:
            case Prepared(program=program, workers=workers):  # a new attempt: what the last one left open stays so
                self._rounds, self._names = program.rounds, [w.name for w in workers]
                self._posted.clear()
            case KernelRan(work=work, round=k, began_at=began_at):
                return Span(work, k, began_at, seen.at, 0, "")
            case m.PostWrites(round=k, index=index):
                post = self._rounds[k].posts[index]
                self._posted[k, post.stage, post.peer] = seen.at, post.nbytes
            case m.WriteDone(round=k, stage=stage, peer=peer):
                begin, nbytes = self._posted.pop((k, stage, peer), (seen.at, 0))
                return Span("post", k, begin, seen.at, nbytes, f"{self._names[peer]} ({stage})")
            case m.Arrived(peer=peer, tag=tag):
                lane = "arrive" if tag.kind is m.Kind.DATA else "signal"
                return Span(lane, tag.round, seen.at, seen.at, 0, f"{self._names[peer]} {tag.kind.name}")
        return None


class Recorder:
    """Keeps the spans of this process's worker in memory, one update after the other: `observe` goes into
    Options(observe=...)."""

    def __init__(self) -> None:
        self._maker = SpanMaker()
        self._spans: list[Span] = []

    def begin(self, version: int) -> None:
        """Forget what was not taken: a version begins."""
        del version
        self._spans.clear()

    def take(self) -> list[Span]:
        """The spans so far; forgets them."""
        taken, self._spans = self._spans, []
        return taken

    def observe(self, seen: Observation) -> None:
        span = self._maker.see(seen)
        if span is not None:
            self._spans.append(span)
