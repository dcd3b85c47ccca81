"""What people and programs are shown of a run."""

from __future__ import annotations

import io
import json
from pathlib import Path

from rich.console import Console
from tests.unit.demo_cases import config, messages_of_a_good_run, record_of_a_good_run

from weightbridge.checkpoint import CheckpointSpec
from weightbridge.cli.demo.display import Display, bytes_text
from weightbridge.cli.demo.document import failure_document, result_document
from weightbridge.cli.demo.folder import CheckpointFolder
from weightbridge.cli.demo.launcher import DemoResult, WorkersFailed
from weightbridge.cli.demo.messages import Progress
from weightbridge.cli.demo.record import DemoRecord
from weightbridge.cli.demo.verdict import judge
from weightbridge.errors import UsageError

FOLDER = CheckpointFolder(
    path=Path("/models/m"),
    model_type="llama",
    spec=CheckpointSpec.from_iterable([("a.weight", (20, 20), "bfloat16"), ("b.weight", (100,), "bfloat16")]),
    dims={},
)


def result(record: DemoRecord) -> DemoResult:
    return DemoResult(name="m", folder=FOLDER, record=record, verdict=judge(record), seconds={"start": 1.25})


def shown(record_of: DemoRecord) -> str:
    console = Console(file=io.StringIO(), width=200)
    with Display(console) as display:
        display.progress(Progress(text="downloading m", done=50e6, total=100e6))
        display.started("m", FOLDER, config())
        record = DemoRecord(config=config())
        for worker, message in messages_of_a_good_run(config()):
            record.apply(worker, message)
            display.changed(record, worker, message)
        display.finished(result(record_of))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert isinstance(text, str)
    return text


def test_the_text_of_a_good_run() -> None:
    text = shown(record_of_a_good_run())
    for part in (
        "tp3: tensor-parallel over 3 workers",
        "trainer/0 sends 700 B",
        "rollout-b receives 1.0 kB",
        "7 rounds over 13 pairs of workers; T_min 0.200 s at 10 Gbit/s",
        "EWTT 1.50 s, AGST 0.50 s; trainers sent 1.0 kB, rollout-a received 1.0 kB",
        "one process with the trainers' weights in bf16: after",
        "in 2 of 2 versions",
        "all verified",
    ):
        assert part in text
    assert text.count("\nversion ") == 2
    assert text.count("verified\n") == 3
    assert "NO" not in text
    assert text.splitlines()[-1].split() == ["verdict", "all", "verified"]


def test_the_text_of_a_bad_run_says_so() -> None:
    record = record_of_a_good_run()
    del record.digests[(2, "tp3/1")]
    text = shown(record)
    assert "in 1 of 2 versions" in text
    assert "NO   every live element" in text
    assert "FAILED" in text


def test_the_document_has_what_programs_rely_on() -> None:
    document = json.loads(json.dumps(result_document(result(record_of_a_good_run()))))
    assert document["all_verified"] is True
    assert document["num_params"] == 500
    assert document["trainers"] == 2
    assert [(e["name"], e["workers"]) for e in document["engines"]] == [("tp3", 3), ("single", 1)]
    assert document["plan"]["model_bytes"] == 1000
    assert document["plan"]["trainer_egress_bytes"] == {"trainer/0": 700, "trainer/1": 300}
    assert document["plan"]["rollout_node_ingress_bytes"] == {"rollout-a": 1000, "rollout-b": 1000}
    assert (document["plan"]["rounds"], document["plan"]["num_pairs"]) == (7, 13)
    version = document["versions"][1]
    assert (version["version"], version["ewtt_seconds"], version["agst_seconds"], version["verified"]) == (
        2,
        1.5,
        0.5,
        True,
    )
    assert version["network_bytes"]["trainers"] == {
        "sent": 1005,
        "received": 80,
        "expected": 1000,
        "within_1_percent": True,
    }
    assert document["answer_before"] == {"tp3": "before", "single": "before"}
    assert document["answer_after"] == {"tp3": "after", "single": "after"}
    assert document["answer_reference"] == "after"
    assert document["checkpoint"]["name"] == "m"


def test_the_document_of_a_failure() -> None:
    error = WorkersFailed(
        "tp3/1 was killed by SIGKILL",
        causes={"tp3/1": "was killed by SIGKILL"},
        dead=("tp3/1",),
        log_dir="/scratch/logs",
        usage=False,
        tracebacks={},
    )
    document = failure_document(error, 1)
    assert document["all_verified"] is False
    assert document["error"]["causes"] == {"tp3/1": "was killed by SIGKILL"}
    assert document["error"]["dead"] == ["tp3/1"]
    assert failure_document(UsageError("no"), 2)["error"] == {"kind": "UsageError", "message": "no", "exit_status": 2}


def test_bytes_are_readable() -> None:
    assert [bytes_text(n) for n in (0, 999, 1000, 269_025_408, 2.5e9)] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "269.0 MB",
        "2.5 GB",
    ]
