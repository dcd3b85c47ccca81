"""The tables and keys of a job.toml, decoded strictly: a key that is not known, or of another type, is an error."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec

from weightbridge.errors import UsageError

__all__ = [
    "ClusterTable",
    "EngineTable",
    "GroupTable",
    "JobFile",
    "ModelTable",
    "NodeTable",
    "TrainerTable",
    "read_job_file",
]

_Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
_Rate = Annotated[float, msgspec.Meta(gt=0, le=1e6)]
_Text = Annotated[str, msgspec.Meta(min_length=1)]
_MAX_FILE_BYTES = 16 << 20


class ModelTable(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """[model]. config: an HF config.json. checkpoint: a folder in safetensors format (its config.json is used where `config`
    is absent). Both paths are relative to the job file. dtype: of the weights, in place of the config's. ignore: patterns of
    checkpoint tensors that are no part of the update."""

    config: _Text | None = None
    checkpoint: _Text | None = None
    dtype: _Text | None = None
    ignore: list[_Text] = msgspec.field(default_factory=list)


class TrainerTable(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """[trainer]. nodes: how many, or their names. gpus_per_node: workers on each, the cluster's by default.

    layout "megatron": tp, pp, cp, ep; the data-parallel degree is what is left. pipeline_layers: layers of each stage.
    vocab_multiple: see MegatronDegrees. layout "fsdp": shard (all workers by default) and sharding.
    maps: one saved map for each worker, or one for all of them, in place of a layout.
    """

    nodes: _Count | list[_Text]
    gpus_per_node: _Count | None = None
    layout: Literal["megatron", "fsdp"] = "megatron"
    tp: _Count = 1
    pp: _Count = 1
    cp: _Count = 1
    ep: _Count = 1
    pipeline_layers: list[_Count] | None = None
    vocab_multiple: _Count = 128
    shard: _Count | None = None
    sharding: Literal["rows", "flat"] = "rows"
    maps: list[_Text] | None = None


class EngineTable(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """[[engine]]. replicas: engines of this kind; beyond one they are called "name-0", "name-1", ...

    tp: workers of one engine. nodes: of all replicas together, how many or their names; replicas are placed in order,
    gpus_per_node workers on each node. ep, attention, layout: see EngineDegrees. maps: as for the trainer, for one engine.
    """

    name: _Text
    tp: _Count | None = None
    ep: _Count = 1
    attention: Literal["tp", "replicated"] = "tp"
    layout: Literal["sglang", "vllm"] = "sglang"
    replicas: _Count = 1
    nodes: _Count | list[_Text] | None = None
    gpus_per_node: _Count | None = None
    maps: list[_Text] | None = None


class NodeTable(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """[[cluster.node]]: nodes that differ from the rest. names: patterns. bandwidth: GB/s of the node's link.

    gpu_bandwidth: GB/s of each of its GPUs' links, where they are no equal shares of the node's.
    """

    names: list[_Text]
    bandwidth: _Rate | None = None
    gpu_bandwidth: list[_Rate] | None = None


class GroupTable(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """[[cluster.group]]: nodes behind one slower uplink. nodes: patterns. bandwidth: GB/s of the uplink, each direction."""

    name: _Text
    nodes: list[_Text]
    bandwidth: _Rate


class ClusterTable(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """[cluster]. node_bandwidth: GB/s (1e9 bytes) of a node's network link, each direction. slot_mib: MiB of one slot."""

    gpus_per_node: _Count = 8
    node_bandwidth: _Rate = 400.0
    slot_mib: _Count = 256
    node: list[NodeTable] = msgspec.field(default_factory=list)
    group: list[GroupTable] = msgspec.field(default_factory=list)


class JobFile(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A whole job.toml."""

    trainer: TrainerTable
    engine: Annotated[list[EngineTable], msgspec.Meta(min_length=1)]
    model: ModelTable = msgspec.field(default_factory=ModelTable)
    cluster: ClusterTable = msgspec.field(default_factory=ClusterTable)
    name: _Text | None = None
    description: str = ""


def read_job_file(path: Path) -> JobFile:
    """The tables of a job file. Blocks on the disk. Raises UsageError naming the file, the key and what was expected."""
    try:
        size = path.stat().st_size
        raw = path.read_bytes() if size <= _MAX_FILE_BYTES else b""
    except OSError as error:
        raise UsageError(f"{path}: expected a job file in TOML, cannot read it: {error.strerror}") from error
    if size > _MAX_FILE_BYTES:
        raise UsageError(f"{path}: {size} bytes are more than the {_MAX_FILE_BYTES} a job file may have")
    try:
        document = msgspec.toml.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: not valid TOML: {error}") from None
    for problem in _unknown_keys(document, JobFile, ""):
        raise UsageError(f"{path}: {problem}")
    try:
        return msgspec.convert(document, JobFile)
    except msgspec.ValidationError as error:
        raise UsageError(f"{path}: {_in_toml_terms(str(error), document)}") from None


def _unknown_keys(value: Any, kind: type[msgspec.Struct], where: str) -> Iterator[str]:
    """What is wrong with the keys of a table and of those below it."""
    if not isinstance(value, dict):
        return
    known = {field.name: field.type for field in msgspec.structs.fields(kind)}
    for key, below in value.items():
        name = f"{where}.{key}" if where else str(key)
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            meant = f"; did you mean {near[0]!r}?" if near else ""
            yield f"key {name!r} = {below!r} is not known; expected one of {', '.join(known)}{meant}"
            continue
        table = _table_of(known[key])
        for item in below if isinstance(below, list) else [below]:
            if table is not None:
                yield from _unknown_keys(item, table, name)


def _table_of(kind: Any) -> type[msgspec.Struct] | None:
    """The Struct that a field's type is, or is a list of."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return kind
    return next((found for part in get_args(kind) if (found := _table_of(part)) is not None), None)


def _in_toml_terms(message: str, document: Any) -> str:
    """A validation message of msgspec with the key as a TOML reader knows it, and the value that is there."""
    what, _, place = message.partition(" - at `$")
    place = place.rstrip("`").lstrip(".")
    if not place:
        return f"{what}; expected the tables [trainer] and [[engine]], and [model] unless all sides give maps"
    value: Any = document
    kind: Any = JobFile
    for step in place.replace("[", ".[").split("."):
        if step in ("", "[...]"):
            return f"key {place!r}: {what}"
        if step.startswith("["):
            value = value[int(step[1:-1])]
            continue
        value = value.get(step)
        table = _table_of(kind)
        types = {} if table is None else {field.name: field.type for field in msgspec.structs.fields(table)}
        kind = types.get(step)
    if choices := _choices_of(kind):
        what = f"expected one of {', '.join(map(repr, choices))}"
    return f"key {place!r}: {what}" + (f", it is {value!r}" if not isinstance(value, dict | list) else "")


def _choices_of(kind: Any) -> tuple[Any, ...]:
    """The values that a field of type Literal allows."""
    return get_args(kind) if get_origin(kind) is Literal else ()
