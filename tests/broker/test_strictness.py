"""A strict claim is held against what was measured, and learning alone never makes it impossible."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import example, given, settings
from hypothesis import strategies as st

from airflow_gpu_provider.broker.engine import Engine
from airflow_gpu_provider.broker.model import Claim, CyclePolicy, Fleet, Node
from airflow_gpu_provider.broker.move import Resized
from airflow_gpu_provider.broker.quota import Quota, Quotas
from airflow_gpu_provider.broker.resize import Wish
from airflow_gpu_provider.broker.throughput import Speeds

from .builders import NOW, claim, fleet_of, lease, node, singles
from .test_cycle_properties import claims, nodes

POLICY = CyclePolicy()
BOTH = fleet_of(node("a", 1, "A100"), node("v", 1, "V100"))
#: The one rated 15 does this work faster than the one rated 35.
TURNED = {"render": Speeds({"A100": 10.0, "V100": 30.0})}


def strict(name: str, least: float, **more: object) -> Claim:
    return claim(name, min_tflops=least, strict=True, task_class="render", **more)  # type: ignore[arg-type]


def placed(engine: Engine) -> dict[str, str]:
    return {each.claim_id: str(each.devices[0]) for each in engine.turn(NOW).placements}


def test_what_is_too_slow_by_measurement_is_refused_whatever_its_rating() -> None:
    engine = Engine(POLICY, BOTH, singles(1, on="v"), [strict("c", 20)], learned=TURNED)
    assert placed(engine) == {}
    (told,) = engine.waiting(NOW)
    assert "of 1 suitable devices 0 free, 1 leased" in told.reason.text
    assert told.reason.text.endswith("judged by what was measured of render")
    engine.end(singles(1, on="v")[0].id)
    assert placed(engine) == {"c": "v/0"}


def test_what_is_learned_while_a_claim_waits_counts_for_it() -> None:
    engine = Engine(POLICY, BOTH, singles(1, on="a"), [strict("c", 20)])
    assert placed(engine) == {}
    engine.learn({"render": Speeds({"A100": 10.0, "V100": 15.0})})
    assert placed(engine) == {}, "too slow everywhere: it waits for what its rating allows"
    (told,) = engine.waiting(NOW)
    assert "judged by the ratings: by what was measured of render too few reach that" in told.reason.text
    engine.learn(TURNED)
    assert placed(engine) == {"c": "v/0"}


def test_a_retry_that_may_not_use_the_fast_device_is_judged_by_the_ratings() -> None:
    engine = Engine(POLICY, BOTH, (), [strict("c", 20, excluded=["v/0"])], learned=TURNED)
    assert placed(engine) == {"c": "a/0"}


def test_what_every_rating_refuses_is_rejected_though_it_was_measured_to_be_fast() -> None:
    """What was measured fades; a claim that was let in by it would become impossible by that alone."""
    engine = Engine(POLICY, fleet_of(node("v", 1, "V100")), (), [strict("c", 20)], learned=TURNED)
    (rejection,) = engine.turn(NOW).rejections
    assert rejection.reason.code.value == "exceeds_tflops"


def test_a_limit_counts_the_devices_that_a_strict_claim_gets_by_measurement() -> None:
    wish = replace(
        strict("c", 20, memory_mib=16_384, milli=125), team="a"
    )  # half of a V100, a part of an A100
    quotas = Quotas({"a": Quota(1, limit=0.3)})
    engine = Engine(POLICY, BOTH, (), [wish], learned=TURNED, quotas=quotas)
    (rejection,) = engine.turn(NOW).rejections
    assert rejection.reason.code.value == "over_quota"


models = st.sampled_from(["A100", "H100", "V100"])


@given(
    found=st.dictionaries(models, st.floats(1, 80), min_size=2),
    least=st.floats(1, 80),
    held=models,
    wanted=models,
)
@settings(max_examples=100, deadline=None)
@example(found={"A100": 10.0, "H100": 12.0}, least=20, held="A100", wanted="H100")
def test_a_strict_lease_never_grows_into_what_is_kept_for_a_claim_however_it_is_judged(
    found: dict[str, float], least: float, held: str, wanted: str
) -> None:
    some = fleet_of(*(node(model.lower(), 3, model) for model in ("A100", "H100", "V100")))
    mine = lease("mine", f"{held.lower()}/0", min_tflops=least, strict=True, task_class="render")
    busy = lease("busy", f"{wanted.lower()}/1")
    engine = Engine(POLICY, some, [mine, busy], [claim("gang", 3, wanted)], learned={"render": Speeds(found)})
    assert placed(engine) == {}
    grown = engine.resizing.resize(mine.id, Wish(gpus=2), NOW)
    free = {f"{wanted.lower()}/{index}" for index in range(3)} - set(mine.devices)
    assert not isinstance(grown, Resized) or not free & set(grown.lease.devices)


speeds = st.dictionaries(st.sampled_from(["A100", "V100"]), st.floats(0.1, 80), min_size=2)


@given(some=nodes(healthy=True), queue=claims("c", most=1), found=speeds, then=speeds)
@settings(max_examples=150, deadline=None)
def test_learning_alone_never_keeps_a_claim_from_a_fleet_that_is_idle(
    some: tuple[Node, ...], queue: list[Claim], found: dict[str, float], then: dict[str, float]
) -> None:
    queue = [replace(each, request=replace(each.request, task_class="render")) for each in queue]
    plain, knowing = Engine(POLICY, Fleet(some), (), queue), Engine(POLICY, Fleet(some), (), queue)
    knowing.learn({"render": Speeds(found)})
    knowing.learn({"render": Speeds(then)})
    told, mine = plain.turn(NOW), knowing.turn(NOW)
    assert mine.rejections == told.rejections
    assert len(mine.placements) == len(told.placements) == len(queue) - len(told.rejections)
    devices = {device.id: device for each in some for device in each.devices}
    for placement in mine.placements:
        request = queue[0].request
        if not request.strict:
            continue
        given_ = [then[devices[name].model] for name in placement.devices]
        enough = [
            name
            for name, device in devices.items()
            if then[device.model] >= request.min_tflops
            and name not in queue[0].excluded
            and (not request.models or device.model in request.models)
        ]
        assert min(given_) >= request.min_tflops or len(enough) < request.gpus or _is_bound(queue[0])


def _is_bound(each: Claim) -> bool:
    """Whether hosts, cores or memory may keep it from the fast devices."""
    request = each.request
    return bool(request.host or request.cpu_cores or request.host_memory_mib or request.memory_mib)
