"""On which devices of a lease which rank comes."""

from __future__ import annotations

from airflow_gpu_provider.operators.training_plan import along_the_ring
from airflow_gpu_provider.wire import DeviceView


def device(name: str, node: str) -> DeviceView:
    return DeviceView(
        id=name, node=node, host=node, model="A100", memory_mib=40_960, tflops=1.0, simulated=True
    )


def test_ranks_follow_a_ring_of_nodes_from_the_relay_and_devices_of_a_node_stay_together() -> None:
    nodes = ["a", "b", "c", "d"]
    lease = [device(f"{node}{number}", node) for number in range(2) for node in nodes]
    slow, latency = {("a", "b"), ("c", "d")}, {"a": {}, "b": {}, "c": {}, "d": {}}
    for one in nodes:
        for other in nodes:
            far = (min(one, other), max(one, other)) in slow
            latency[one][other] = 20.0 if far else 0.5 if "c" in (one, other) else 1.0
    order = [each.id for each in along_the_ring(lease, latency)]
    assert order[:2] == ["c0", "c1"] and order[4:6] == ["d0", "d1"], "c is the relay, d opposite of it"
    assert {order[2][0], order[6][0]} == {"a", "b"} and order[3][0] == order[2][0]


def test_without_measurements_devices_keep_the_order_of_the_lease() -> None:
    lease = [device("a0", "a"), device("a1", "a"), device("b0", "b")]
    assert along_the_ring(lease, {}) == lease
