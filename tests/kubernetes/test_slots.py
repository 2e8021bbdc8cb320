"""Which slots are free: never more than Kubernetes could still serve."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from airflow_gpu_provider.kubernetes.dcgm import Reading
from airflow_gpu_provider.kubernetes.offers import Offer
from airflow_gpu_provider.kubernetes.pods import Needs, PodUse
from airflow_gpu_provider.kubernetes.slots import Slot, slots_of

GPU = "nvidia.com/gpu"


def offer(slots: int = 4, healthy: int | None = None) -> Offer:
    return Offer(GPU, slots, slots if healthy is None else healthy, "H100", 81_559, 111.0)


def use(name: str, gpus: int, lease: str | None = None) -> PodUse:
    return PodUse(("ns", name), "gpu-0", Needs(gpus={GPU: gpus}), lease=lease)


def held(*leases: str) -> dict[int, frozenset[str]]:
    return {index: frozenset({lease}) for index, lease in enumerate(leases)}


def gpu(index: int, *, pod: str | None = None, xid: int | None = None) -> Reading:
    return Reading(
        f"GPU-{index}", index, pod=None if pod is None else ("ns", pod), xid=xid, utilisation=index / 10
    )


def open_slots(slots: tuple[Slot, ...], leases: dict[int, frozenset[str]] | None = None) -> list[int]:
    return [
        each.index for each in slots if not (each.suspect or each.unavailable or each.index in (leases or {}))
    ]


@st.composite
def nodes(draw: st.DrawFn) -> tuple[Offer, list[PodUse], dict[int, frozenset[str]], list[Reading]]:
    count = draw(st.integers(1, 8))
    leases = draw(
        st.dictionaries(
            st.integers(0, count - 1), st.sampled_from(["l1", "l2"]).map(lambda x: frozenset({x}))
        )
    )
    lease = st.sampled_from([None, "l1", "l2", "ended"])
    pods = [use(f"p{i}", *draw(st.tuples(st.integers(0, 3), lease))) for i in range(draw(st.integers(0, 4)))]
    readings = [
        gpu(
            i,
            pod=draw(st.sampled_from([None, "p0", "p1", "away"])),
            xid=draw(st.sampled_from([None, 43, 79])),
        )
        for i in range(draw(st.sampled_from([0, count])))
    ]
    return offer(count, draw(st.integers(0, count))), pods, leases, readings


@given(nodes())
def test_never_more_is_open_than_kubernetes_could_still_serve(
    drawn: tuple[Offer, list[PodUse], dict[int, frozenset[str]], list[Reading]],
) -> None:
    offered, pods, leases, readings = drawn
    slots = slots_of(offered, pods, leases, readings)
    taken = sum(pod.needs.gpus[GPU] for pod in pods)
    ours = {name: sum(name in lease for lease in leases.values()) for name in ("l1", "l2")}
    covered = sum(
        min(count, sum(pod.needs.gpus[GPU] for pod in pods if pod.lease == name))
        for name, count in ours.items()
    )
    left = offered.healthy - len(leases) - (taken - covered)
    is_open = open_slots(slots, leases)
    assert len(is_open) <= max(0, left)
    if not any(reading.xid == 79 for reading in readings):
        assert len(is_open) == max(0, left)  # nor less, where nothing is at fault


@given(nodes())
def test_a_measured_gpu_is_shown_once_and_slots_under_lease_are_not_taken_by_others(
    drawn: tuple[Offer, list[PodUse], dict[int, frozenset[str]], list[Reading]],
) -> None:
    offered, pods, leases, readings = drawn
    slots = slots_of(offered, pods, leases, readings)
    shown = [slot.reading.uuid for slot in slots if slot.reading]
    assert sorted(shown) == sorted(reading.uuid for reading in readings)
    assert not any(slot.unavailable for slot in slots if slot.index in leases)


def test_pods_of_others_close_the_last_slots_and_are_named() -> None:
    slots = slots_of(offer(), [use("notebook", 2)], {})
    assert open_slots(slots) == [0, 1]
    assert slots[3].unavailable == "used by pods outside the broker: ns/notebook"


def test_a_pod_under_lease_takes_what_the_lease_holds_and_no_more() -> None:
    leases = held("l1", "l1")
    assert open_slots(slots_of(offer(), [use("shard", 2, "l1")], leases), leases) == [2, 3]
    assert open_slots(slots_of(offer(), [use("shard", 3, "l1")], leases), leases) == [2]


def test_a_pod_whose_lease_has_ended_keeps_its_slot_until_it_is_gone() -> None:
    assert open_slots(slots_of(offer(2), [use("shard", 1, "l1")], {})) == [0]


def test_a_device_that_kubernetes_does_not_offer_is_suspect_the_one_with_an_error_first() -> None:
    slots = slots_of(offer(4, healthy=3), [], {})
    assert [slot.index for slot in slots if slot.suspect] == [3]
    assert "3 of 4" in str(slots[3].suspect)
    measured = slots_of(offer(4, healthy=3), [], {}, [gpu(0), gpu(1, xid=79), gpu(2), gpu(3)])
    [suspect] = [slot for slot in measured if slot.suspect]
    assert suspect.reading is not None and suspect.reading.index == 1
    assert str(suspect.suspect).startswith("XID 79")


def test_an_error_that_programs_cause_makes_nothing_suspect() -> None:
    assert len(open_slots(slots_of(offer(), [], {}, [gpu(0, xid=43)]))) == 4


def test_a_lease_shows_the_gpu_that_its_pod_got() -> None:
    readings = [gpu(0, pod="notebook"), gpu(1), gpu(2, pod="shard"), gpu(3)]
    slots = slots_of(offer(), [use("shard", 1, "l1"), use("notebook", 1)], {1: frozenset({"l1"})}, readings)
    by_slot = {slot.index: slot.reading.index for slot in slots if slot.reading}
    assert by_slot == {0: 1, 1: 2, 2: 3, 3: 0}
    assert [slot.index for slot in slots if slot.unavailable] == [3]
