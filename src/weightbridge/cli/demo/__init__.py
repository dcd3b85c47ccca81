"""`weightbridge demo`: real weights trained, sent and served by real processes on one machine, and then proven equal.

The launcher (`launcher.run_demo`) imports no torch. It prepares a checkpoint, starts trainers and engines as processes
of their own (`worker`), watches them (`supervisor`), gathers what they report (`record`), judges it by means of its own
(`verdict`) and shows it (`display`, `document`).
"""

from __future__ import annotations

__all__: list[str] = []
