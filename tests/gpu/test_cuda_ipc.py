"""Device memory mapped into another process, and host memory that kernels of a GPU write, on a real device."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from tests.kernel_cases import row

from weightbridge.errors import RegistrationError
from weightbridge.kernels import Buffer, choose_kernels
from weightbridge.transports.cuda_ipc import DeviceHandle, DeviceMemory, MappedDeviceMemory, PinnedMemory
from weightbridge.transports.memory import SharedMemory

pytest.importorskip("triton", reason="the package triton is not installed (the extra 'gpu')")

NEIGHBOUR = """
import sys
import torch
from tests.kernel_cases import row
from weightbridge.kernels import Buffer, choose_kernels
from weightbridge.transports.cuda_ipc import DeviceHandle, MappedDeviceMemory
handle, nbytes, gpu = bytes.fromhex(sys.argv[1]), int(sys.argv[2]), bytes.fromhex(sys.argv[3])
torch.cuda.init()
mapped = MappedDeviceMemory(DeviceHandle(handle, nbytes, gpu), 0)
kernels = choose_kernels("triton").on(0)
half = nbytes // 2
# Reads the first half of the neighbour's memory and writes it into the second one backwards, two bytes at a time.
table = row([half // 2], [2], [-2], dst_offset=nbytes - 2, itemsize=2)
ticket = kernels.launch(kernels.prepare(table, [mapped.buffer], [mapped.buffer]))
while not ticket.done():
    torch.cuda.synchronize()
mapped.close()
print("done")
"""


def on_device(tensor: torch.Tensor, nbytes: int) -> Buffer:
    return Buffer(tensor.data_ptr(), nbytes, tensor.device.index)


def copy(source: Buffer, target: Buffer) -> None:
    kernels = choose_kernels("triton").on(torch.cuda.current_device())
    kernels.follow_caller()
    ticket = kernels.launch(kernels.prepare(row([source.nbytes], [1], [1], itemsize=1), [source], [target]))
    while not ticket.done():
        torch.cuda.synchronize()


def test_a_neighbour_reads_and_writes_device_memory_in_place():
    nbytes = (1 << 20) + 36
    owner = DeviceMemory(nbytes, torch.cuda.current_device())
    values = np.random.default_rng(1).integers(0, 1 << 16, nbytes // 4, dtype=np.uint16)
    there = torch.from_numpy(values.view(np.uint8)).cuda()
    copy(on_device(there, nbytes // 2), owner.buffer._replace(nbytes=nbytes // 2))
    handle = owner.handle
    command = [sys.executable, "-c", NEIGHBOUR, handle.handle.hex(), str(nbytes), handle.gpu.hex()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "done", done.stderr[-3000:]
    back = torch.zeros(nbytes // 2, dtype=torch.uint8, device="cuda")
    copy(Buffer(owner.buffer.address + nbytes // 2, nbytes // 2, owner.buffer.device), on_device(back, nbytes // 2))
    np.testing.assert_array_equal(back.cpu().numpy().view(np.uint16), values[::-1])
    owner.close()


def test_a_handle_whose_owner_is_gone_is_refused():
    owner = DeviceMemory(1 << 20, torch.cuda.current_device())
    handle = DeviceHandle(bytes(64), owner.handle.nbytes, owner.handle.gpu)
    with pytest.raises(RegistrationError, match="cuIpcOpenMemHandle_v2"):
        MappedDeviceMemory(handle, torch.cuda.current_device())
    owner.close()


def test_kernels_pack_straight_into_pinned_shared_memory():
    memory = SharedMemory(1 << 20, prefault=True)
    pinned = PinnedMemory(memory.memory.buffer, torch.cuda.current_device())
    values = torch.arange(1 << 18, dtype=torch.int32, device="cuda")
    copy(on_device(values, 1 << 20), pinned.buffer)
    np.testing.assert_array_equal(memory.array.view(np.int32), np.arange(1 << 18, dtype=np.int32))
    pinned.close()
    memory.close()
