"""Jobs that need not exist: spec, topology and source maps from model shapes and sharding rules, for planning ahead."""

from __future__ import annotations

from weightbridge.deployments.deployment import DEFAULT_SLOT_BYTES, Deployment
from weightbridge.deployments.job import load_job
from weightbridge.deployments.presets import PRESETS, preset

__all__ = ["DEFAULT_SLOT_BYTES", "PRESETS", "Deployment", "load_job", "preset"]
