"""A lease that may shrink hears how many of its devices would let others start, and grows if none would."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from airflow_gpu_provider.broker.engine import Engine
from airflow_gpu_provider.broker.model import Claim, CyclePolicy, Fleet, Lease
from airflow_gpu_provider.broker.resize import Wish
from airflow_gpu_provider.broker.resizing import Fitted

from .builders import NOW, claim, fleet, fleet_of, lease, node


def engine_of(some: Fleet, leases: list[Lease], *claims: Claim) -> Engine:
    engine = Engine(CyclePolicy(), some, leases, claims)
    engine.turn(NOW)
    return engine


def fitted(engine: Engine, held: Lease, least: int, most: int) -> Fitted:
    found = engine.resizing.fit(held.id, Wish(gpus=most, least=least), NOW)
    assert found is not None
    engine.validate()
    return found


def test_a_lease_takes_what_is_idle_up_to_its_most() -> None:
    held = lease("x", "n0/0")
    engine = engine_of(fleet(1, 4), [held])
    assert len(fitted(engine, held, 1, 3).resized.lease.devices) == 3
    assert len(fitted(engine, held, 1, 9).resized.lease.devices) == 4, "as many as there are, not all or none"


def test_a_waiting_claim_wants_as_many_devices_back_as_let_it_start() -> None:
    held = lease("x", "n0/0 n0/1 n0/2 n0/3")
    engine = engine_of(fleet(1, 5), [held], claim("gang", 3))
    found = fitted(engine, held, 1, 8)
    assert found.wanted_back == 2, "with the idle one that is kept for it"
    assert found.resized.lease.devices == held.devices, "nothing is taken while somebody waits"
    engine.resizing.resize(held.id, Wish(gpus=2, leave=held.devices[2:]), NOW)
    assert [len(each.devices) for each in engine.turn(NOW).placements] == [3]
    assert fitted(engine, held, 1, 2).wanted_back == 0


def test_several_claims_that_wait_want_what_serves_all_of_them() -> None:
    held = lease("x", "n0/0 n0/1 n0/2 n0/3")
    engine = engine_of(fleet(1, 4), [held], claim("one"), claim("pair", 2))
    assert fitted(engine, held, 1, 4).wanted_back == 3
    assert fitted(engine, held, 2, 4).wanted_back == 1, "the pair, which comes later, cannot have two"


def test_claims_that_ask_for_the_same_want_a_device_each() -> None:
    held = lease("x", "n0/0 n0/1 n0/2 n0/3")
    engine = engine_of(fleet(1, 4), [held], claim("one"), claim("two"), claim("three"), claim("four"))
    assert (fitted(engine, held, 2, 4).wanted_back, fitted(engine, held, 1, 4).wanted_back) == (2, 3)


def test_who_waits_for_other_devices_or_for_more_than_there_would_be_wants_nothing_back() -> None:
    some = fleet_of(node("a", 4, "V100"), node("b", 1, "A100"))
    held, busy = lease("x", "a/0 a/1 a/2", model="V100"), lease("busy", "b/0")
    engine = engine_of(some, [held, busy], claim("waits", model="A100"))
    assert fitted(engine, held, 1, 4).wanted_back == 0
    full = lease("full", "n0/0 n0/1 n0/2")
    engine = engine_of(fleet(1, 6), [full, lease("other", "n0/3 n0/4 n0/5")], claim("gang", 3))
    assert fitted(engine, full, 1, 3).wanted_back == 0, "two of them and none elsewhere serve nobody"


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_what_is_wanted_back_lets_somebody_start_and_asking_changes_nothing_else(data: st.DataObject) -> None:
    nodes, size = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    names = [f"n{n}/{i}" for n in range(nodes) for i in range(size)]
    held_names = data.draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
    rest = [name for name in names if name not in held_names]
    busy = data.draw(st.lists(st.sampled_from(rest), unique=True)) if rest else []
    held = lease("x", " ".join(held_names))
    others = [lease(f"b{number}", name) for number, name in enumerate(busy)]
    sizes = data.draw(st.lists(st.integers(1, 5), max_size=4))
    waiting = [claim(f"c{number}", gpus) for number, gpus in enumerate(sizes)]
    engine = engine_of(fleet(nodes, size), [held, *others], *waiting)
    least = data.draw(st.integers(1, len(held_names)))
    most = data.draw(st.integers(len(held_names), len(names)))
    found = fitted(engine, held, least, most)
    now = found.resized.lease
    assert now.devices[: len(held_names)] == held.devices and len(now.devices) <= max(most, len(held_names))
    assert found.wanted_back <= len(held_names) - least
    if found.wanted_back:
        assert now.devices == held.devices
        left = len(held_names) - found.wanted_back
        engine.resizing.resize(held.id, Wish(gpus=left, leave=held.devices[left:]), NOW)
        assert engine.turn(NOW).placements, "who waits starts"
    engine.validate()
