from __future__ import annotations

import importlib

import pytest

MODULES = [
    "penstock.testing",
    "penstock.testing.clock",
    "penstock.testing.fault_plan",
    "penstock.testing.faulty_store",
    "penstock.testing.linearizability",
    "penstock.testing.queue_model",
    "penstock.testing.sim_loop",
    "penstock.testing.simulation",
]


@pytest.mark.parametrize("name", MODULES)
def test_every_listed_name_exists_once_and_in_order(name: str) -> None:
    module = importlib.import_module(name)
    names: list[str] = module.__all__
    assert len(set(names)) == len(names)
    assert all(hasattr(module, listed) for listed in names)
    # Constants, then classes, then functions, each in alphabetical order.
    assert names == sorted(names, key=lambda text: (not text.isupper(), not text[0].isupper(), text))
