"""The agreement on a step as messages of the control plane: what the hub's leader says becomes what a member hears, and back.

One table for both ends. The instructions that are left out are for the shell around a machine: gates, locks and installs.
"""

from __future__ import annotations

from weightbridge.machine import agreement as a
from weightbridge.machine import messages as w

__all__ = ["for_leader", "for_member", "of_leader", "of_member"]


def of_leader(instruction: a.LeaderInstruction, *, connect: bool) -> tuple[int, w.Message] | None:
    """(member, message) that an instruction of the leader stands for. connect: the request is for probing."""
    match instruction:
        case a.SendPropose(member=m, request=r):
            return m, w.Propose(request=r, connect=connect)
        case a.SendCommit(member=m, request=r, target=target):
            return m, w.Commit(request=r, target=target)
        case a.SendInstall(member=m, request=r):
            return m, w.InstallNow(request=r)
        case a.AskIdle(member=m, request=r, attempt=n):
            return m, w.AskIdle(request=r, attempt=n)
        case a.SendIdleInstall(member=m, request=r, attempt=n):
            return m, w.IdleInstall(request=r, attempt=n)
        case a.SendIdleRelease(member=m, request=r, attempt=n):
            return m, w.IdleRelease(request=r, attempt=n)
        case a.SendAbort(member=m, request=r):
            return m, w.StopRequest(request=r)
    return None


def for_member(message: w.Message) -> a.MemberEvent | None:
    """What a word of the hub tells a member, if it is about the agreement."""
    match message:
        case w.Propose(request=r):
            return a.Proposed(r)
        case w.Commit(request=r, target=target):
            return a.Committed(r, target)
        case w.InstallNow(request=r):
            return a.InstallAllowed(r)
        case w.AskIdle(request=r, attempt=n):
            return a.IdleAsked(r, n)
        case w.IdleInstall(request=r, attempt=n):
            return a.IdleInstall(r, n)
        case w.IdleRelease(request=r, attempt=n):
            return a.IdleReleased(r, n)
        case w.StopRequest(request=r):
            return a.Aborted(r)
    return None


def of_member(instruction: a.MemberInstruction) -> w.Message | None:
    """The message to the hub that an instruction of a member stands for."""
    match instruction:
        case a.SendPromise(request=r, bound=bound):
            return w.Promise(request=r, bound=bound)
        case a.SendIdle(request=r, attempt=n, held=held, count=count):
            return w.IdleAnswer(request=r, attempt=n, held=held, count=count)
        case a.SendParked(request=r):
            return w.Parked(request=r)
        case a.SendInstalled(request=r):
            return w.Installed(request=r)
        case a.SendAborted(request=r):
            return w.Stopped(request=r)
    return None


def for_leader(rank: int, message: w.Message) -> a.LeaderEvent | None:
    """What a word of the member with this rank tells the leader, if it is about the agreement."""
    match message:
        case w.Promise(request=r, bound=bound):
            return a.PromiseFrom(rank, r, bound)
        case w.Parked(request=r):
            return a.ParkedFrom(rank, r)
        case w.IdleAnswer(request=r, attempt=n, held=held, count=count):
            return a.IdleFrom(rank, r, n, held, count)
        case w.Installed(request=r):
            return a.InstalledFrom(rank, r)
        case w.Stopped(request=r):
            return a.AbortedFrom(rank, r)
    return None
