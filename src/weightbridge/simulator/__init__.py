"""Drives the transfer machines of all workers in virtual time over a model of links; baselines, studies and reports.

`simulate` runs one update of a plan and its programs; `Costs` says what each step takes, `Simulation` what came of it.
"""

from __future__ import annotations

from weightbridge.simulator.costs import Cost, Costs, list_costs
from weightbridge.simulator.faults import LateEngine, LostWorker, SlowNode
from weightbridge.simulator.flows import EventLoop, FlowModel
from weightbridge.simulator.links import Links
from weightbridge.simulator.simulation import Failure, Simulation
from weightbridge.simulator.skeleton import Skeleton, skeleton_of
from weightbridge.simulator.update import simulate

__all__ = [
    "Cost",
    "Costs",
    "EventLoop",
    "Failure",
    "FlowModel",
    "LateEngine",
    "Links",
    "LostWorker",
    "Simulation",
    "Skeleton",
    "SlowNode",
    "list_costs",
    "simulate",
    "skeleton_of",
]
