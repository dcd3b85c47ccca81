"""Planning: who sends which bytes to whom, through which stages and in how many rounds, proven against a lower bound.

`make_plan` makes a `Plan` from all workers' source maps and the topology; `verify_plan` checks any plan without using
the planner; `encode_plan` and `decode_plan` are its wire form.
"""

from weightbridge.plan.plan import HOP, ROUTE, STAGES, AtomTable, Bounds, Plan, ReplicaClass
from weightbridge.plan.planner import PlanOptions, make_plan
from weightbridge.plan.topology import NodeGroup, Role, Topology, Worker
from weightbridge.plan.verify import PlanFacts, verify_plan
from weightbridge.plan.wire import decode_plan, encode_plan

__all__ = [
    "HOP",
    "ROUTE",
    "STAGES",
    "AtomTable",
    "Bounds",
    "NodeGroup",
    "Plan",
    "PlanFacts",
    "PlanOptions",
    "ReplicaClass",
    "Role",
    "Topology",
    "Worker",
    "decode_plan",
    "encode_plan",
    "make_plan",
    "verify_plan",
]
