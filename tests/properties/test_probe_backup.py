"""Backups of live tensors: what comes back is what was there, from memory or from a file, tile by tile."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from weightbridge.checkpoint import CheckpointSpec
from weightbridge.errors import ProbeError, UsageError
from weightbridge.probe import ProbeOptions, probe
from weightbridge.probe import backup as backup_module
from weightbridge.probe.backup import back_up


def some_tensors() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    base = torch.randn(13, 17, 5, generator=generator)
    return [
        base.to(torch.bfloat16),
        torch.randn(40, 9, generator=generator)[::3, 1:7],  # gaps in memory
        base[:, :, 2].t(),
        torch.randint(0, 255, (11, 3), generator=generator, dtype=torch.uint8).view(torch.float8_e4m3fn),
        torch.tensor(7.5, dtype=torch.float64),
        torch.tensor([True, False, True]),
        torch.zeros(0, 4),
        torch.randn(1, 6, generator=generator).expand(5, 6),
        torch.full((3,), float("nan")),
    ]


def bits_of(tensors: list[torch.Tensor]) -> list[bytes]:
    return [t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for t in tensors]


def overwrite(tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        backup_module.distinct_elements(tensor).zero_()


@pytest.mark.parametrize("tile_bytes", [1, 64, 16 << 20])
@pytest.mark.parametrize("in_file", [False, True])
def test_everything_comes_back(in_file: bool, tile_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backup_module, "_TILE_BYTES", tile_bytes)
    tensors = some_tensors()
    before = bits_of(tensors)
    with back_up(tensors, tmp_path if in_file else True) as kept:
        assert list(tmp_path.iterdir()) == []  # a file without a name
        overwrite(tensors)
        assert bits_of(tensors) != before
        kept.restore()
        assert bits_of(tensors) == before
        overwrite(tensors)
        kept.restore()  # once more
    assert bits_of(tensors) == before


@pytest.mark.parametrize("in_file", [False, True])
def test_what_moved_is_filled_where_it_is_now(in_file: bool, tmp_path: Path) -> None:
    tensors = some_tensors()
    before = bits_of(tensors)
    elsewhere: list[torch.Tensor | None] = [torch.zeros_like(t, memory_format=torch.contiguous_format) for t in tensors]
    elsewhere[1] = None
    elsewhere[4] = torch.zeros(2, dtype=torch.float64)
    elsewhere[5] = torch.zeros(3)
    with back_up(tensors, str(tmp_path) if in_file else True) as kept:
        kept.restore(elsewhere)
    for position, (target, bits) in enumerate(zip(elsewhere, before, strict=True)):
        if position in (1, 4, 5):
            assert target is None or not target.any()  # another shape or dtype: left alone
        elif position != 7:  # expanded: only its distinct elements are kept
            assert target is not None
            assert bits_of([target]) == [bits]


@pytest.mark.parametrize("moves", [False, True])
def test_a_probe_puts_the_weights_back_from_a_file(moves: bool, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(5)
    live = {"w": torch.randn(9, 14, generator=generator), "pad": torch.full((6,), -2.5)}
    before = {name: t.clone() for name, t in live.items()}
    spec = CheckpointSpec.from_iterable([("w", (18, 14), torch.float32)])

    def load(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        own = dict(tensors)["w"][9:]
        if moves:
            live["w"] = own.clone()  # other storage: refused, and filled again all the same
        live["w"].copy_(own)
        live["pad"].fill_(0)

    run = partial(probe, spec=spec, load_weights=load, tensors=lambda: live, options=ProbeOptions(backup=tmp_path))
    if moves:
        with pytest.raises(ProbeError, match="does not write in place"):
            run()
    else:
        assert run().copies.src_start.tolist() == [9 * 14]
    for name, tensor in live.items():
        assert torch.equal(tensor, before[name])
    assert list(tmp_path.iterdir()) == []


def test_without_a_backup_nothing_is_put_back() -> None:
    tensors = some_tensors()
    with back_up(tensors, False) as kept:
        overwrite(tensors)
        kept.restore()
    assert not any(np.frombuffer(bits, np.uint8).any() for bits in bits_of(tensors))


def test_a_folder_that_is_none_is_refused_before_anything_changes(tmp_path: Path) -> None:
    tensors = some_tensors()
    before = bits_of(tensors)
    with pytest.raises(UsageError, match="nowhere does not take files"):
        back_up(tensors, tmp_path / "nowhere")
    assert bits_of(tensors) == before


def test_a_folder_without_room_is_refused() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")

    def full(**_: object) -> object:
        return open("/dev/full", "r+b", buffering=0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backup_module.tempfile, "TemporaryFile", full)
        with pytest.raises(UsageError, match="24 bytes do not fit into"):
            back_up([torch.zeros(6)], Path("somewhere"))


def test_a_backup_that_cannot_be_read_says_so(tmp_path: Path) -> None:
    tensor = torch.ones(100)
    with back_up([tensor], tmp_path) as kept:
        kept._file.truncate(120)  # type: ignore[attr-defined]
        with pytest.raises(ProbeError, match=r"cannot be read back \(the file ends early\)"):
            kept.restore()


def test_only_a_tile_is_in_memory_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backup_module, "_TILE_BYTES", 1000)
    tensor = torch.arange(30 * 40 * 7).reshape(30, 40, 7).transpose(0, 2)
    sizes = [t.numel() * t.element_size() for t in backup_module._tiles(tensor)]
    assert max(sizes) <= 1000
    assert sum(sizes) == tensor.numel() * 8
