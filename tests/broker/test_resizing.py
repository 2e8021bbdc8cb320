"""A lease grows on the engine's state behind those who wait, and has both places while it moves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import timedelta

from airflow_gpu_provider.broker.engine import Engine
from airflow_gpu_provider.broker.model import Claim, CyclePolicy, DeviceId, Fleet, Lease, ReasonCode
from airflow_gpu_provider.broker.move import Offer, Resized, ResizeRefused
from airflow_gpu_provider.broker.quota import Quota, Quotas
from airflow_gpu_provider.broker.resize import Wish
from airflow_gpu_provider.broker.throughput import Speeds

from .builders import NOW, claim, fleet, fleet_of, lease, node

V100_GIB, A100_GIB = 32, 80


def wish_gib(gib: int) -> Wish:
    return Wish(memory_mib=gib * 1024)


def engine_of(some: Fleet, leases: Iterable[Lease] = (), claims: Iterable[Claim] = ()) -> Engine:
    engine = Engine(CyclePolicy(), some, leases, claims)
    engine.turn(NOW)
    assert engine.is_settled
    return engine


def mixed() -> Fleet:
    """A small device beside a large one."""
    return fleet_of(node("a", 1, "V100"), node("b", 1, "A100"))


def test_a_wish_is_for_one_thing_at_a_time() -> None:
    engine = engine_of(fleet(), [held := lease("x", "n0/0")])
    for wish in (Wish(), Wish(memory_mib=1, gpus=1)):
        found = engine.resizing.resize(held.id, wish, NOW)
        assert isinstance(found, ResizeRefused) and "one of them at a time" in found.reason


def test_a_lease_grows_into_what_is_free_and_what_it_gives_back_is_given_to_those_who_wait() -> None:
    engine = engine_of(fleet(1, 2), [held := lease("x", "n0/0")])
    grown = engine.resizing.resize(held.id, Wish(gpus=2), NOW)
    assert isinstance(grown, Resized) and grown.lease.devices == ("n0/0", "n0/1")
    engine.submit(claim("waits"))
    assert engine.turn(NOW).placements == ()
    shrunk = engine.resizing.resize(held.id, Wish(gpus=1, leave=(DeviceId("n0/0"),)), NOW)
    assert isinstance(shrunk, Resized) and shrunk.freed == ("n0/0",)
    assert not engine.is_settled
    (placement,) = engine.turn(NOW).placements
    assert placement.devices == ("n0/0",)
    engine.validate()


def test_telling_a_wish_again_changes_nothing() -> None:
    engine = engine_of(fleet(1, 3), [held := lease("x", "n0/0 n0/1")])
    for wish in (Wish(gpus=3), Wish(gpus=2, leave=(DeviceId("n0/1"),)), wish_gib(4)):
        first = engine.resizing.resize(held.id, wish, NOW)
        engine.turn(NOW)
        again = engine.resizing.resize(held.id, wish, NOW)
        assert isinstance(first, Resized) and again == Resized(first.lease)
        assert engine.is_settled, "nothing happened to anybody"


def test_what_is_kept_for_a_waiting_gang_is_not_free_for_a_lease_that_grows() -> None:
    engine = engine_of(fleet(1, 2), [held := lease("x", "n0/0")], [claim("gang", 2)])
    found = engine.resizing.resize(held.id, Wish(gpus=2), NOW)
    assert isinstance(found, ResizeRefused) and "no 1 free" in found.reason
    engine.withdraw(claim("gang", 2).id)
    engine.turn(NOW)
    assert isinstance(engine.resizing.resize(held.id, Wish(gpus=2), NOW), Resized)


def test_who_waits_for_other_devices_is_not_in_the_way() -> None:
    some = fleet_of(node("a", 2, "V100"), node("b", 1, "A100"))
    busy, held = lease("busy", "b/0"), lease("x", "a/0", model="V100")
    engine = engine_of(some, [busy, held], [claim("waits", model="A100")])
    assert isinstance(engine.resizing.resize(held.id, Wish(gpus=2), NOW), Resized)


def test_both_places_are_held_until_the_commit_and_only_the_new_one_after_it() -> None:
    engine = engine_of(mixed(), [held := lease("x", "a/0")])
    offer = engine.resizing.resize(held.id, wish_gib(64), NOW)
    assert isinstance(offer, Offer) and offer.moves == (("a/0", "b/0"),)
    engine.submit(claim("one"))
    engine.submit(claim("two"))
    assert engine.turn(NOW).placements == ()
    assert isinstance(engine.resizing.accept(held.id, NOW), Offer)
    engine.validate()
    done = engine.resizing.commit(held.id, NOW + timedelta(minutes=9))
    assert isinstance(done, Resized) and done.lease.devices == ("b/0",)
    (placement,) = engine.turn(NOW).placements
    assert placement.devices == ("a/0",), "the old place is free, for one of them"
    engine.validate()


def test_an_offer_that_runs_out_or_is_declined_frees_the_new_place_and_leaves_the_lease() -> None:
    for decline in (True, False):
        engine = engine_of(mixed(), [held := lease("x", "a/0", expires_in_s=600)])
        engine.resizing.resize(held.id, wish_gib(64), NOW)
        engine.submit(claim("waits"))
        if decline:
            assert engine.resizing.decline(held.id) is not None
        decisions = engine.turn(NOW + timedelta(seconds=60))
        assert decisions.lapsed == (() if decline else (held.id,))
        assert [each.devices for each in decisions.placements] == [("b/0",)]
        for late in (engine.resizing.accept(held.id, NOW), engine.resizing.commit(held.id, NOW)):
            assert isinstance(late, ResizeRefused) and "still held" in late.reason
        engine.validate()


def test_an_offer_ends_with_its_lease() -> None:
    for by_time in (True, False):
        engine = engine_of(mixed(), [held := lease("x", "a/0", expires_in_s=30)])
        engine.resizing.resize(held.id, wish_gib(64), NOW)
        if not by_time:
            engine.end(held.id)
        decisions = engine.turn(NOW + timedelta(seconds=90))
        assert (len(decisions.expired), decisions.lapsed) == (int(by_time), ())
        assert engine.resizing.accept(held.id, NOW) is None, "it is not live"
        assert int(engine.floor.capacity.milli.sum()) == 2000
        engine.validate()


def test_an_offer_outlives_changes_of_the_fleet_and_a_take_over() -> None:
    some = mixed()
    engine = engine_of(some, [held := lease("x", "a/0")])
    offer = engine.resizing.resize(held.id, wish_gib(64), NOW)
    assert isinstance(offer, Offer)
    drained = fleet_of(some.nodes[0], replace(some.nodes[1], unavailable="drained"))
    for seen in (drained, some, fleet_of(*some.nodes, node("c", 1)), fleet_of(some.nodes[0]), some):
        engine.set_fleet(seen, NOW)
        engine.validate()
    assert int(engine.floor.capacity.milli.sum()) == 0
    heir = Engine(CyclePolicy(), some, [held], offers=[offer])
    heir.submit(claim("waits"))
    assert heir.turn(NOW).placements == ()
    assert isinstance(heir.resizing.accept(held.id, NOW), Offer)
    assert isinstance(heir.resizing.commit(held.id, NOW), Resized)
    heir.validate()


def test_a_lease_does_not_grow_beyond_the_limit_of_its_team() -> None:
    quotas = Quotas({"vision": Quota(devices=1, limit=2)})
    mine = replace(lease("x", "n0/0"), claim=replace(claim("x"), team="vision"))
    engine = Engine(CyclePolicy(), fleet(1, 3), [mine], quotas=quotas)
    engine.submit(replace(claim("gang", 2), team="vision"))
    engine.turn(NOW)
    found = engine.resizing.resize(mine.id, Wish(gpus=3), NOW)
    assert isinstance(found, ResizeRefused)
    assert "asked 2 device(s) more; team vision holds 1 and may have 2" in found.reason
    assert isinstance(engine.resizing.resize(mine.id, Wish(gpus=2), NOW), Resized), "the gang keeps nothing"
    engine.turn(NOW)
    assert isinstance(engine.resizing.resize(mine.id, Wish(gpus=1), NOW), Resized)
    engine.turn(NOW)
    assert isinstance(engine.resizing.resize(mine.id, Wish(gpus=2), NOW), Resized), (
        "what was given back counts"
    )
    engine.validate()


def test_members_that_join_are_like_those_there_where_enough_such_are_free() -> None:
    some = fleet_of(node("a", 4, "A100"), node("v", 3, "V100"))
    engine = engine_of(some, [held := lease("x", "v/0")])
    two = engine.resizing.resize(held.id, Wish(gpus=3), NOW)
    assert isinstance(two, Resized) and sorted(two.lease.devices) == ["v/0", "v/1", "v/2"]
    four = engine.resizing.resize(held.id, Wish(gpus=4), NOW)
    assert isinstance(four, Resized) and four.lease.devices[3].startswith("a/")


def test_the_match_degree_is_that_of_the_weakest_member_it_has_now() -> None:
    some = fleet_of(node("a", 1, "A100"), node("b", 1, "V100"))
    engine = engine_of(some, [held := lease("x", "a/0", min_tflops=35, task_class="render")])
    assert engine.resizing.match_degree(held) == 1.0
    engine.learn({"render": Speeds({"A100": 7.0, "V100": 70.0})})
    assert engine.resizing.match_degree(held) == 0.2, "as when it was placed"
    engine.learn({})
    engine.turn(NOW)
    grown = engine.resizing.resize(held.id, Wish(gpus=2), NOW)
    assert isinstance(grown, Resized)
    assert engine.resizing.match_degree(grown.lease) < 1.0


def _of_team(name: str, devices: str, **more: object) -> Lease:
    return replace(lease(name, devices, **more), claim=replace(claim(name), team="vision"))  # type: ignore[arg-type]


def test_what_an_open_move_would_add_counts_at_the_limit_of_its_team() -> None:
    half = {"memory_mib": A100_GIB * 512, "milli": 125}
    mine, other = _of_team("x", "n0/0", **half), lease("y", "n0/0", milli=500)
    engine = Engine(CyclePolicy(), fleet(1, 3), [mine, other], quotas=Quotas({"vision": Quota(1, limit=1)}))
    engine.turn(NOW)
    offer = engine.resizing.resize(mine.id, wish_gib(A100_GIB * 3 // 4), NOW)
    assert isinstance(offer, Offer)
    assert engine.resizing.resize(mine.id, wish_gib(A100_GIB * 3 // 4), NOW) == offer, "it counts once"
    engine.submit(replace(claim("more", milli=500), team="vision"))
    assert engine.turn(NOW).placements == ()
    assert engine.waiting(NOW)[0].reason.code is ReasonCode.OVER_QUOTA
    engine.resizing.decline(mine.id)
    assert [each.claim_id for each in engine.turn(NOW).placements] == ["more"]
    engine.validate()


def test_what_teams_were_given_in_a_turn_does_not_keep_leases_from_changing() -> None:
    engine = Engine(CyclePolicy(), fleet(1, 4), [_of_team("x", "n0/0")], quotas=Quotas({"vision": Quota(4)}))
    for number in range(2):
        engine.submit(replace(claim(f"c{number}"), team="vision"))
        assert not engine.is_settled
        (placement,) = engine.turn(NOW).placements
        assert engine.is_settled, "nobody more can start since a team got more"
        engine.granted(placement, _of_team(f"l{number}", placement.devices[0]))
        assert engine.is_settled


def test_a_wish_for_less_or_as_much_is_no_wish_for_more() -> None:
    held = lease("x", "n0/0 n0/1", memory_mib=8).request
    assert [wish.is_more(held) for wish in (Wish(gpus=3), Wish(memory_mib=9))] == [True, True]
    assert not any(wish.is_more(held) for wish in (Wish(gpus=2), Wish(gpus=1), Wish(memory_mib=8), Wish()))
