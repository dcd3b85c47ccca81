"""The I/O shell around the machines: control plane, life cycle, and the two adapters that users hold."""

from weightbridge.coordinator.options import Options
from weightbridge.coordinator.receiver import ReceiverAdapter
from weightbridge.coordinator.sender import SenderAdapter, UpdateHandle, UpdateReport

__all__ = ["Options", "ReceiverAdapter", "SenderAdapter", "UpdateHandle", "UpdateReport"]
