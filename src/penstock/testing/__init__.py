"""Doubles and kits for testing programs that use Penstock, and Penstock itself.

- `penstock.testing.clock`: a clock that moves only by explicit calls
- `penstock.testing.simulation`: a seeded event loop on virtual time
- `penstock.testing.faulty_store`: an object store with injected faults
- `penstock.testing.linearizability`: a checker for recorded histories
- `penstock.testing.queue_model`: the manifest queue as a model for that checker
- `penstock.testing.disk`: a disk that can lose power; imported from its module
- `penstock.testing.store_kit`: the contract of an object store as tests; imported from its module
- `penstock.testing.otlp_kit`: realistic and random telemetry; imported from its module
- `penstock.testing.memory_storage`: a database's storage in memory, with faults; imported from its module
- `penstock.testing.storage_kit`: the contract of such a storage as tests; imported from its module
- `penstock.testing.topics_kit`: an event log without threads; imported from its module
"""

from __future__ import annotations

from penstock.testing.clock import ManualClock
from penstock.testing.faulty_store import (
    DEFAULT_RATES,
    FAULTS_OF,
    FaultKind,
    FaultPlan,
    FaultyStore,
    ListingJournal,
)
from penstock.testing.linearizability import UNKNOWN, History, Model, Operation, Verdict, check
from penstock.testing.queue_model import QueueModel
from penstock.testing.simulation import (
    Deadlock,
    HorizonReached,
    SimClock,
    SimLoop,
    Simulation,
    SimulationError,
    run_simulation,
)

__all__ = [
    "DEFAULT_RATES",
    "FAULTS_OF",
    "UNKNOWN",
    "Deadlock",
    "FaultKind",
    "FaultPlan",
    "FaultyStore",
    "History",
    "HorizonReached",
    "ListingJournal",
    "ManualClock",
    "Model",
    "Operation",
    "QueueModel",
    "SimClock",
    "SimLoop",
    "Simulation",
    "SimulationError",
    "Verdict",
    "check",
    "run_simulation",
]
