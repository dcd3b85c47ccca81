"""A trainer under torchrun: what the guide on launching shows, around a toy model."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch.distributed as dist
from tests.multiprocess import toy_job as toy

# [launch trainer]
from weightbridge import Options, SenderAdapter

dist.init_process_group("gloo")  # torchrun has set rank, size and the address to meet at
where = {
    "endpoint": os.environ["WB_ENDPOINT"],
    "node": os.uname().nodename,
    "options": Options(token=os.environ["WB_TOKEN"].encode(), data_host=os.environ["WB_DATA_HOST"]),
}
# [/launch trainer]
spec = toy.checkpoint_spec()
model = toy.TrainerShard(spec, dist.get_rank(), dist.get_world_size())
load_weights, tensors = model.load_weights, model.tensors
# [launch trainer]
sender = SenderAdapter(
    group=dist.group.WORLD, checkpoint=spec, load_weights=load_weights, tensors=tensors, engines=["a", "b"], **where
)
sender.connect()
# [/launch trainer]
for version in (1, 2, 3):
    model.load_weights(toy.weights(spec, version).items())
    report = sender.send_weights(version).wait()
    assert dict(report.engines) == {"a": "ready", "b": "ready"}
Path(sys.argv[1], f"trainer{dist.get_rank()}").write_text(str(report.version))
sender.close()
dist.destroy_process_group()
