"""An engine under torchrun, one process a worker: what the guide on launching shows, around a toy model."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from tests.multiprocess import toy_job as toy

# [launch engine]
from weightbridge import Options, ReceiverAdapter

dist.init_process_group("gloo")
where = {
    "endpoint": os.environ["WB_ENDPOINT"],
    "node": os.uname().nodename,
    "options": Options(token=os.environ["WB_TOKEN"].encode(), data_host=os.environ["WB_DATA_HOST"]),
}
# [/launch engine]
spec, engine = toy.checkpoint_spec(), os.environ["WB_ENGINE"]
model = toy.engine_worker(spec, "tp" if dist.get_world_size() == toy.TP else "solo", dist.get_rank())
load_weights, tensors = model.load_weights, model.tensors
# [launch engine]
receiver = ReceiverAdapter(
    group=dist.group.WORLD, checkpoint=spec, load_weights=load_weights, tensors=tensors, engine=engine, **where
)
# [/launch engine]
give_up = time.monotonic() + 60
serving = torch.tensor([1])
while serving:
    assert time.monotonic() < give_up
    # [launch engine]
    receiver.poll_requests()  # between two steps, on every worker
    # [/launch engine]
    serving = torch.tensor([int(receiver.version < 3)])
    dist.all_reduce(serving)  # stands for an inference step: all workers make the same number of them
wanted = toy.engine_worker(spec, "tp" if dist.get_world_size() == toy.TP else "solo", dist.get_rank())
wanted.load_weights(toy.rounded(spec, 3).items())
differing = toy.same_bytes(wanted.tensors(), model.tensors())
Path(sys.argv[1], f"{engine}{dist.get_rank()}").write_text(f"{receiver.version} {differing}")
receiver.close()
dist.destroy_process_group()
