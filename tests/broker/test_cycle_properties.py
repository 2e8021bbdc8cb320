"""What holds for any fleet and any queue."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import datetime, timedelta

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from airflow_gpu_provider.broker.admission import reject_reason
from airflow_gpu_provider.broker.cycle import decide
from airflow_gpu_provider.broker.model import (
    Claim,
    CyclePolicy,
    Decisions,
    Fleet,
    GpuRequest,
    Node,
    ReasonCode,
    RunType,
    Snapshot,
)

from .builders import NOW, after, claim, fleet, fleet_of, node, placed, singles, snapshot
from .invariants import check, fits_empty

POLICY = CyclePolicy()
LONG = timedelta(days=30)
quick = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])

MODELS = ("A100", "V100")


artifacts = st.frozensets(st.sampled_from(["/a", "/b", "sha256:c"]), max_size=2)


#: where a node's devices lie, and where it stands; mostly unknown
topology = st.one_of(
    st.just({}),
    st.fixed_dictionaries(
        {
            "nvlink": st.text("ab-", max_size=4),
            "numa": st.lists(st.sampled_from([None, 0, 1]), max_size=4),
            "labels": st.dictionaries(st.sampled_from(["rack", "zone"]), st.sampled_from("pq")),
            "latency_ms": st.dictionaries(
                st.sampled_from(["n0", "n1", "n2", "n3"]), st.sampled_from([1.0, 2.0])
            ),
        }
    ),
)


@st.composite
def nodes(draw: st.DrawFn, *, healthy: bool = False) -> tuple[Node, ...]:
    made = []
    for index in range(draw(st.integers(1, 4))):
        models = draw(st.lists(st.sampled_from(MODELS), min_size=1, max_size=4))
        bad = {} if healthy else draw(st.dictionaries(st.integers(0, 3), st.just("suspect"), max_size=1))
        made.append(
            node(
                f"n{index}",
                models=models,
                host=f"h{draw(st.integers(0, 1))}",
                cpu_cores=draw(st.sampled_from([4, 10, 16])),
                memory_mib=draw(st.sampled_from([1000, 64_000])),
                bad=bad,
                load=None if healthy else draw(st.sampled_from([None, None, 0.1, 0.9])),
                unavailable=None if healthy else draw(st.sampled_from([None, None, None, "drained"])),
                artifacts=draw(artifacts),
                **draw(topology),
            )
        )
    return tuple(made)


requests = st.builds(
    GpuRequest,
    gpus=st.integers(1, 6),
    models=st.sampled_from([(), ("A100",), ("V100",), ("A100", "V100")]).map(frozenset),
    min_tflops=st.sampled_from([0.0, 15.0, 35.0]),
    strict=st.booleans(),
    milli=st.sampled_from([1000, 1000, 400, 500, 125]),
    memory_mib=st.sampled_from([0, 0, 4_000, 8_192, 16_384, 20_000]),
    cpu_cores=st.sampled_from([0.0, 1.0, 4.0, 6.5]),
    host_memory_mib=st.sampled_from([0, 0, 700]),
    host=st.sampled_from([None, None, None, "h0", "h1"]),
    spares=st.integers(0, 2),
    max_runtime_s=st.sampled_from([None, 10.0, 60.0, 100.0]),
)


#: of which some read artifacts
reading = st.builds(
    lambda request, wanted, required: replace(request, artifacts=wanted, artifacts_required=required),
    requests,
    st.one_of(st.just(frozenset()), artifacts),
    st.booleans(),
)


@st.composite
def claims(
    draw: st.DrawFn, prefix: str, *, most: int = 8, of: st.SearchStrategy[GpuRequest] = requests
) -> list[Claim]:
    devices = [f"n{index}/{slot}" for index in range(4) for slot in range(4)]
    return [
        replace(
            claim(
                f"{prefix}{number}",
                value=draw(st.integers(0, 3)),
                run_type=draw(st.sampled_from(RunType)),
                waited_min=draw(st.integers(0, 5)),
                excluded=draw(st.sampled_from([(), (), (), tuple(devices[:2]), tuple(devices[4:7])])),
            ),
            request=draw(of),
        )
        for number in range(draw(st.integers(0, most)))
    ]


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    """A fleet with leases that an earlier cycle could have granted, and a queue."""
    some = fleet_of(*draw(nodes()))
    earlier = snapshot(some, draw(claims("old")))
    granted = after(earlier, decide(earlier, NOW, POLICY), NOW)
    late = draw(st.lists(st.booleans(), min_size=len(granted.leases), max_size=len(granted.leases)))
    leases = [
        replace(each, expires_at=NOW) if is_late else each
        for each, is_late in zip(granted.leases, late, strict=True)
    ]
    return snapshot(some, draw(claims("new")), leases)


@given(some=nodes(), asked=claims("c", of=reading))
@quick
def test_what_requires_artifacts_runs_only_where_they_are_or_says_that_it_waits_for_them(
    some: tuple[Node, ...], asked: list[Claim]
) -> None:
    before = snapshot(fleet_of(*some), asked)
    decided = decide(before, NOW, POLICY)
    check(before, decided, NOW, POLICY)
    loose = [replace(each, request=replace(each.request, artifacts_required=False)) for each in asked]
    rejected = {each.claim_id for each in decide(snapshot(before.fleet, loose), NOW, POLICY).rejections}
    assert {each.claim_id for each in decided.rejections} == rejected, "artifacts can be brought"
    wanted = {each.id: each.request for each in asked}
    for each in decided.waiting:
        request = wanted[each.claim_id]
        nowhere = not any(request.artifacts <= node.artifacts for node in some)
        if request.artifacts_required and nowhere:
            assert (each.reason.code, each.starts_in_s) == (ReasonCode.ARTIFACTS_ABSENT, None)


@given(before=snapshots())
@quick
def test_no_device_is_over_committed_and_no_gang_is_partial(before: Snapshot) -> None:
    first = decide(before, NOW, POLICY)
    check(before, first, NOW, POLICY)
    then = after(before, first, NOW)
    second = decide(then, NOW, POLICY)
    check(then, second, NOW, POLICY)
    assert second.placements == (), "a second cycle on the same state finds nothing more to give"


@given(some=nodes(), queue=claims("c"))
@quick
def test_a_claim_is_rejected_exactly_when_the_empty_fleet_has_no_room_for_it(
    some: tuple[Node, ...], queue: list[Claim]
) -> None:
    for each in queue:
        rejection = reject_reason(each.request, Fleet(some), each.excluded)
        assert (rejection is None) == fits_empty(each.request, Fleet(some), each.excluded), rejection


@given(some=nodes(healthy=True), queue=claims("c", most=1))
@quick
def test_an_admitted_claim_alone_on_an_idle_fleet_starts_at_once(
    some: tuple[Node, ...], queue: list[Claim]
) -> None:
    decisions = decide(snapshot(Fleet(some), queue), NOW, POLICY)
    assert decisions.waiting == ()


@given(before=snapshots())
@quick
def test_the_order_in_which_rows_are_read_changes_nothing(before: Snapshot) -> None:
    other = Snapshot(Fleet(before.fleet.nodes[::-1]), before.leases[::-1], before.claims[::-1])
    one, two = decide(before, NOW, POLICY), decide(other, NOW, POLICY)
    assert one == decide(before, NOW, POLICY)
    assert one.placements == two.placements
    assert one.waiting == two.waiting
    assert set(one.rejections) == set(two.rejections)


def _until(before: Snapshot, head: str, limit_s: float) -> float | None:
    """Return when ``head`` starts if every lease ends as promised, or None if not within the limit."""
    now, state = NOW, before
    while (now - NOW).total_seconds() <= limit_s:
        over = {each.claim_id for each in state.leases if each.ends_by is not None and each.ends_by <= now}
        state = replace(state, leases=tuple(each for each in state.leases if each.claim_id not in over))
        decisions = decide(state, now, POLICY)
        if head in placed(decisions):
            return (now - NOW).total_seconds()
        state = after(state, decisions, now, ttl=LONG)
        ends = [each.ends_by for each in state.leases if each.ends_by is not None]
        if not ends:
            return None
        now = min(ends)
    return None


promising = requests.map(lambda each: replace(each, max_runtime_s=each.max_runtime_s or 45.0))


@given(some=nodes(healthy=True), old=claims("old", of=promising), new=claims("new", of=requests))
@settings(quick, max_examples=200)
def test_the_blocked_head_is_not_delayed_by_later_claims(
    some: tuple[Node, ...], old: list[Claim], new: list[Claim]
) -> None:
    start = snapshot(Fleet(some), old)
    first = decide(start, NOW, POLICY)
    running = replace(after(start, first, NOW, ttl=LONG), claims=tuple(new))
    told: Decisions = decide(running, NOW, POLICY)
    if not told.waiting or told.waiting[0].starts_in_s is None:
        return
    head, expected = told.waiting[0].claim_id, told.waiting[0].starts_in_s
    begun = _until(running, head, expected)
    assert begun is not None, f"{head} was expected in {expected} s"
    assert begun <= expected


@given(for_a=claims("a"), for_v=claims("v"), busy_a=st.integers(0, 8), busy_v=st.integers(0, 3))
@quick
def test_independent_flavors_never_block_one_another(
    for_a: list[Claim], for_v: list[Claim], busy_a: int, busy_v: int
) -> None:
    some = fleet_of(node("a", 8, "A100", host="h0"), node("v", 4, "V100", host="h1"), node("v2", 2, "V100"))
    queue_a = [_of_model(each, "A100") for each in for_a]
    queue_v = [_of_model(each, "V100") for each in for_v]
    recent = tuple(each.request for each in [*queue_a, *queue_v])
    leases = (*singles(busy_a, on="a"), *singles(busy_v, on="v"))
    both = decide(Snapshot(some, leases, (*queue_a, *queue_v), recent), NOW, POLICY)
    alone = decide(Snapshot(some, leases, tuple(queue_v), recent), NOW, POLICY)
    assert {name: devices for name, devices in placed(both).items() if name.startswith("v")} == placed(alone)


def _of_model(each: Claim, model: str) -> Claim:
    return replace(each, request=replace(each.request, models=frozenset({model}), host=None))


@given(
    gangs=st.lists(st.integers(2, 8), min_size=1, max_size=3),
    runtimes=st.lists(st.sampled_from([None, 30.0, 600.0]), min_size=1, max_size=8),
)
@example(gangs=[8], runtimes=[None])
@settings(quick, max_examples=30)
def test_singles_that_keep_coming_never_starve_gangs(gangs: list[int], runtimes: list[float | None]) -> None:
    """However few devices become free, each gang gets its own of those that do, one after the other."""
    in_order = CyclePolicy(small_first=0)
    queue = [claim(f"gang{number}", size) for number, size in enumerate(gangs)]
    state = snapshot(fleet(2, 4), queue, singles(4, on="n0") + singles(4, on="n1"))
    waits = {each.id for each in queue}
    for number in range(8 * len(gangs)):
        now = NOW + timedelta(minutes=number + 1)
        state = _fed(state, number, runtimes[number % len(runtimes)], now)
        decisions = decide(state, now, in_order)
        check(state, decisions, now, in_order)
        waits -= placed(decisions).keys()
        if not waits:
            return
        assert decisions.waiting[0].claim_id == min(waits)
        state = after(state, decisions, now, ttl=LONG)
    raise AssertionError(f"{waits} starved")


@given(gang=st.integers(2, 8), runtime=st.sampled_from([None, 60.0, 600.0]))
@example(gang=8, runtime=60.0)
@settings(quick, max_examples=10)
def test_smaller_work_overtakes_a_gang_for_a_bounded_time(gang: int, runtime: float | None) -> None:
    state = snapshot(fleet(2, 4), [claim("gang", gang)], singles(4, on="n0") + singles(4, on="n1"))
    doublings = math.log2(gang * 240 / (240 if runtime is None else runtime / 60))
    bound_h = math.ceil(doublings * POLICY.small_first / POLICY.ageing_per_min / 60)
    for hour in range(1, bound_h + 9):
        now = NOW + timedelta(hours=hour)
        state = _fed(state, hour, runtime, now)
        decisions = decide(state, now, POLICY)
        if "gang" in placed(decisions):
            return
        state = after(state, decisions, now, ttl=LONG)
    raise AssertionError(f"the gang starved, though nobody who came after {bound_h} h is before it")


def _fed(state: Snapshot, number: int, runtime: float | None, now: datetime) -> Snapshot:
    """Return the state when the oldest lease has ended and one more claim for a device came."""
    fed = replace(claim(f"fed{number}", max_runtime_s=runtime), submitted_at=now)
    return _long(replace(state, claims=(*state.claims, fed), leases=state.leases[1:]))


def _long(state: Snapshot) -> Snapshot:
    return replace(state, leases=tuple(replace(each, expires_at=NOW + LONG) for each in state.leases))
