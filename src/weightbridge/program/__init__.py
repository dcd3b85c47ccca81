"""Programs: what one worker does in each round, with every offset final. Data only.

`lower` makes a worker's program from the plan and its source map, `lower_job` those of all workers; `verify_program`,
`verify_job` and `verify_programs` check them without sharing code with `lower`; `encode_program` and `decode_program` carry
one between processes.
"""

from __future__ import annotations

from weightbridge.program.job import lower_job
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
from weightbridge.program.verify_job import ProgramFacts, verify_job
from weightbridge.program.wire import decode_program, encode_program

__all__ = [
    "DESCRIPTOR",
    "MAX_AXES",
    "SEGMENT",
    "Assemble",
    "Await",
    "Op",
    "Post",
    "ProgramFacts",
    "Round",
    "SlotSpec",
    "WorkerProgram",
    "decode_program",
    "encode_program",
    "lower",
    "lower_job",
    "slot_specs",
    "verify_job",
    "verify_program",
    "verify_programs",
]
