"""A user's own job: from a job.toml to a Deployment."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from weightbridge.checkpoint.dtypes import DType, dtype_named
from weightbridge.checkpoint.safetensors_reader import spec_from_folder
from weightbridge.checkpoint.spec import CheckpointSpec
from weightbridge.deployments.architecture import Architecture, checkpoint_spec
from weightbridge.deployments.cluster import Seats, engine_names, node_names, place_workers, topology_of
from weightbridge.deployments.deployment import Deployment
from weightbridge.deployments.job_file import EngineTable, JobFile, ModelTable, TrainerTable, read_job_file
from weightbridge.deployments.model_config import architecture_from_config
from weightbridge.deployments.rollout_rules import EngineDegrees, engine_maps
from weightbridge.deployments.sharded_rules import ShardedDegrees, sharded_maps
from weightbridge.deployments.trainer_rules import MegatronDegrees, megatron_maps
from weightbridge.errors import SpecError, UsageError, WeightBridgeError
from weightbridge.layout.source_map import SourceMap
from weightbridge.plan.topology import Role
from weightbridge.probe.map_files import load_map

__all__ = ["load_job"]

_MAX_CONFIG_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class _Model:
    """architecture: None where the job gives maps alone. spec: likewise."""

    architecture: Architecture | None
    spec: CheckpointSpec | None


@dataclass(frozen=True, slots=True)
class _Side:
    """Maps of the trainer or of one engine, and the spec of those that came from files."""

    maps: tuple[SourceMap, ...]
    spec: CheckpointSpec


def load_job(path: str | Path) -> Deployment:
    """The deployment that a job.toml describes; paths in it are relative to it. Blocks on the disk.

    Raises UsageError naming file, key, value and what to do; UnsupportedError for a model without sharding rules; LayoutError
    where a degree does not divide a size, or maps and checkpoint do not belong together.
    """
    file = Path(path)
    job = read_job_file(file)
    with _named(f"{file}: [model]"):
        model = _model(job.model, file.parent)
    with _named(f"{file}: [trainer]"):
        trainer = _trainer(job, model, file.parent)
    engines = []
    for table in job.engine:
        with _named(f"{file}: [[engine]] {table.name!r}"):
            engines.append(_engine(table, model, file.parent))
    _check_specs(file, job, trainer, engines)
    with _named(str(file)):
        topology = topology_of(place_workers(_seats(job, trainer, engines), job.cluster), job.cluster)
        maps = list(trainer.maps)
        for table, engine in zip(job.engine, engines, strict=True):
            maps += engine.maps * table.replicas
        return Deployment(
            name=job.name or file.stem, description=job.description, spec=trainer.spec, topology=topology, maps=tuple(maps),
            slot_bytes=job.cluster.slot_mib << 20,
        )  # fmt: skip


@contextmanager
def _named(where: str) -> Iterator[None]:
    """Errors from within begin with `where`."""
    try:
        yield
    except WeightBridgeError as error:
        fields = {name: value for name, value in vars(error).items() if name != "message" and not name.startswith("_")}
        raise type(error)(f"{where}: {error.message}", **fields) from error


def _model(table: ModelTable, root: Path) -> _Model:
    if table.config is None and table.checkpoint is None:
        return _Model(None, None)
    folder = None if table.checkpoint is None else root / table.checkpoint
    file = root / table.config if table.config is not None else (folder or root) / "config.json"
    config = _json(file)
    dtype: DType | None = None if table.dtype is None else dtype_named(table.dtype)
    architecture = architecture_from_config(config, dtype=dtype, where=str(file))
    spec = checkpoint_spec(architecture)
    return _Model(architecture, spec if folder is None else _real_spec(folder, spec, table.ignore))


def _json(file: Path) -> dict[str, object]:
    try:
        if file.stat().st_size > _MAX_CONFIG_BYTES:
            raise UsageError(
                f"{file}: {file.stat().st_size} bytes are more than the {_MAX_CONFIG_BYTES} a config may have"
            )
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{file}: expected the model's config.json, cannot read it: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{file}: no valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise UsageError(f"{file}: expected a JSON object, found {type(found).__name__}")
    return found


def _real_spec(folder: Path, expected: CheckpointSpec, ignore: list[str]) -> CheckpointSpec:
    """The folder's own spec, without ignored tensors; it must hold the tensors of the config and no others."""
    found = spec_from_folder(folder)
    found = CheckpointSpec(
        tensors=tuple(t for t in found.tensors if not any(fnmatchcase(t.name, pattern) for pattern in ignore))
    )
    for t in expected.tensors:
        position = found.index.get(t.name)
        if position is None:
            raise SpecError(f"{folder}: tensor {t.name!r} of the config is absent from the checkpoint", tensor=t.name)
        other = found.tensors[position]
        if (other.shape, other.dtype) != (t.shape, t.dtype):
            raise SpecError(
                f"{folder}: tensor {t.name!r} has shape {list(other.shape)} and dtype {other.dtype.name}, its config says "
                f"{list(t.shape)} and {t.dtype.name}; config and checkpoint do not belong together, or set dtype",
                tensor=t.name,
            )
    extra = [t.name for t in found.tensors if t.name not in expected.index]
    if extra:
        raise SpecError(
            f"{folder}: tensor {extra[0]!r} ({len(extra)} such) follows from no key of the config; name it in ignore if it is "
            "no part of the update",
            tensor=extra[0],
        )
    return found


def _trainer(job: JobFile, model: _Model, root: Path) -> _Side:
    table = job.trainer
    num_nodes = table.nodes if isinstance(table.nodes, int) else len(table.nodes)
    num_workers = num_nodes * (table.gpus_per_node or job.cluster.gpus_per_node)
    if table.maps is not None:
        _only_with_a_layout(table, ("tp", "pp", "cp", "ep", "pipeline_layers", "shard"), "maps are given")
        return _from_files(table.maps, num_workers, root)
    architecture, spec = _known(model)
    if table.layout == "fsdp":
        _only_with_a_layout(table, ("tp", "pp", "cp", "ep", "pipeline_layers"), "layout is 'fsdp'")
        degrees = ShardedDegrees(num_workers=num_workers, shard=table.shard or num_workers, sharding=table.sharding)
        return _Side(sharded_maps(architecture, spec, degrees), spec)
    _only_with_a_layout(table, ("shard",), "layout is 'megatron'")
    return _Side(
        megatron_maps(
            architecture,
            spec,
            MegatronDegrees(
                num_workers=num_workers, tp=table.tp, pp=table.pp, cp=table.cp, ep=table.ep,
                stage_layers=None if table.pipeline_layers is None else tuple(table.pipeline_layers),
                vocab_multiple=table.vocab_multiple,
            ),
        ),
        spec,
    )  # fmt: skip


def _only_with_a_layout(table: TrainerTable, keys: tuple[str, ...], why: str) -> None:
    """A degree that would be ignored is a misunderstanding."""
    for key in keys:
        value = getattr(table, key)
        if value not in (None, 1):
            raise UsageError(f"{key} = {value} has no meaning when {why}; leave it out")


def _engine(table: EngineTable, model: _Model, root: Path) -> _Side:
    if table.maps is not None:
        if table.ep != 1:
            raise UsageError(f"ep = {table.ep} has no meaning when maps are given; leave it out")
        return _from_files(table.maps, table.tp or len(table.maps), root)
    if table.tp is None:
        raise UsageError("tp is missing; give the number of workers of one engine, or maps")
    architecture, spec = _known(model)
    degrees = EngineDegrees(tp=table.tp, ep=table.ep, attention=table.attention, style=table.layout)
    return _Side(engine_maps(architecture, spec, degrees), spec)


def _known(model: _Model) -> tuple[Architecture, CheckpointSpec]:
    if model.architecture is None or model.spec is None:
        raise UsageError(
            'neither maps nor a model are given; set config = "config.json" in [model], or maps = [...] here'
        )
    return model.architecture, model.spec


def _from_files(names: list[str], num_workers: int, root: Path) -> _Side:
    if len(names) not in (1, num_workers):
        raise UsageError(
            f"maps names {len(names)} files for {num_workers} workers; give one for each in the order of their ranks, or one "
            "for all"
        )
    saved = [load_map(root / name) for name in names]
    for name, other in zip(names, saved, strict=True):
        if other.spec.digest != saved[0].spec.digest:
            raise UsageError(f"maps {names[0]!r} and {name!r} are of different checkpoints; save them with one model")
    maps = tuple(s.source_map for s in saved)
    return _Side(maps if len(maps) == num_workers else maps * num_workers, saved[0].spec)


def _check_specs(file: Path, job: JobFile, trainer: _Side, engines: list[_Side]) -> None:
    for table, engine in zip(job.engine, engines, strict=True):
        if engine.spec.digest == trainer.spec.digest:
            continue
        ours, theirs = ({(t.name, t.shape, t.dtype.name) for t in side.spec.tensors} for side in (trainer, engine))
        differing = sorted({name for name, *_ in ours ^ theirs})
        what = f"they differ in {len(differing)} tensors, {differing[0]!r} first" if differing else "in another order"
        raise UsageError(
            f"{file}: the trainer and [[engine]] {table.name!r} speak of different checkpoints ({what}); give all sides one "
            "model, or maps saved with the same checkpoint"
        )


def _seats(job: JobFile, trainer: _Side, engines: list[_Side]) -> list[Seats]:
    """Where the workers of the trainer and of each engine sit."""
    per_node = job.trainer.gpus_per_node or job.cluster.gpus_per_node
    with _named("[trainer]"):
        nodes = node_names(job.trainer.nodes, len(trainer.maps), per_node, "trainer")
    names = [name for table in job.engine for name in engine_names(table.name, table.replicas)]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"two engines are called {name!r}; give each [[engine]] a name of its own")
    seats = [Seats.filling(Role.TRAINER, "", len(trainer.maps), nodes, per_node)]
    for table, engine in zip(job.engine, engines, strict=True):
        per_node = table.gpus_per_node or job.cluster.gpus_per_node
        size = len(engine.maps)
        with _named(f"[[engine]] {table.name!r}"):
            nodes = node_names(table.nodes, size * table.replicas, per_node, table.name)
        seats += [
            Seats.filling(Role.ROLLOUT, name, size, nodes, per_node, first=replica * size)
            for replica, name in enumerate(engine_names(table.name, table.replicas))
        ]
    return seats
