"""What a session tells, to where people look: logs, JSON lines, Prometheus, progress bars, traces for Perfetto,
`weightbridge top`.

Observers are callables for Options(on_event=...). None of them is needed by the rest of the library.
"""

from weightbridge.observability.bars import ProgressBars
from weightbridge.observability.json_lines import JsonLines, event_from_json, event_to_json, read_events
from weightbridge.observability.logs import LoggingObserver, compose
from weightbridge.observability.prometheus import PrometheusObserver
from weightbridge.observability.trace import Trace
from weightbridge.observability.trace_format import merge_traces
from weightbridge.observability.watching import watch

__all__ = [
    "JsonLines",
    "LoggingObserver",
    "ProgressBars",
    "PrometheusObserver",
    "Trace",
    "compose",
    "event_from_json",
    "event_to_json",
    "merge_traces",
    "read_events",
    "watch",
]
