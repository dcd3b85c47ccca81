"""Programs: what one worker does in each round, with every offset final. Data only.

`lower` makes a worker's program from the plan and its source map, `verify_program` and `verify_programs` check it without
sharing code with `lower`, `encode_program` and `decode_program` carry it between processes.
"""

from __future__ import annotations

from weightbridge.program.lower import lower
from weightbridge.program.program import (
    DESCRIPTOR,
    MAX_AXES,
    SEGMENT,
    Assemble,
    Await,
    Op,
    Post,
    Round,
    SlotSpec,
    WorkerProgram,
)
from weightbridge.program.slots import slot_specs
from weightbridge.program.verify import verify_program, verify_programs
from weightbridge.program.wire import decode_program, encode_program

__all__ = [
    "DESCRIPTOR",
    "MAX_AXES",
    "SEGMENT",
    "Assemble",
    "Await",
    "Op",
    "Post",
    "Round",
    "SlotSpec",
    "WorkerProgram",
    "decode_program",
    "encode_program",
    "lower",
    "slot_specs",
    "verify_program",
    "verify_programs",
]
