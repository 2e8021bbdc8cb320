"""Which boards lie near one another, over the faked driver."""

from __future__ import annotations

import pynvml
from fake_nvml import FakeNvml, Part, slice_of

from airflow_gpu_provider.inventory.nvml import NvmlProbe
from airflow_gpu_provider.inventory.nvml_session import NvmlSession


def probe_of(nvml: FakeNvml) -> NvmlProbe:
    return NvmlProbe("node-a", host_name="host-a", session=NvmlSession(lambda: nvml))


def domains(probe: NvmlProbe) -> dict[str, str | None]:
    (node,) = probe.read()
    return {device.id: device.nvlink for device in node.devices}


def numas(probe: NvmlProbe) -> dict[str, int | None]:
    (node,) = probe.read()
    return {device.id: device.numa for device in node.devices}


def test_boards_that_are_joined_directly_are_one_domain_by_pairs() -> None:
    pairs = {7: 8, 8: 7, 9: 10, 10: 9}
    boards = [Part(f"GPU-{bus}", bus=bus, links=[other, other]) for bus, other in pairs.items()]
    found = domains(probe_of(FakeNvml(*boards, Part("GPU-pcie", bus=11))))
    assert found == {
        "GPU-7": "0000:07:00",
        "GPU-8": "0000:07:00",
        "GPU-9": "0000:09:00",
        "GPU-10": "0000:09:00",
        "GPU-pcie": None,
    }


def test_boards_on_the_same_switches_are_one_domain() -> None:
    boards = [Part(f"GPU-{bus}", bus=bus, links=[0xC0, 0xC1]) for bus in range(1, 9)]
    assert set(domains(probe_of(FakeNvml(*boards))).values()) == {"0000:01:00"}


def test_a_chain_is_one_domain_whatever_the_order_of_the_boards() -> None:
    chain = [Part("GPU-1", bus=1, links=[2]), Part("GPU-3", bus=3, links=[2]), Part("GPU-2", bus=2, links=[])]
    assert set(domains(probe_of(FakeNvml(*chain))).values()) == {"0000:01:00"}


def test_links_that_are_down_join_nothing_and_are_looked_at_again_within_a_minute() -> None:
    boards = [Part("GPU-1", bus=1, links=[None]), Part("GPU-2", bus=2, links=[None])]
    nvml = FakeNvml(*boards)
    probe = probe_of(nvml)
    assert set(domains(probe).values()) == {None}
    boards[0].links, boards[1].links = [2], [1]  # the fabric manager came up
    looks = nvml.link_looks
    seen = [set(domains(probe).values()) for _ in range(59)]
    assert nvml.link_looks == looks and seen[-1] == {None}, "not at each read"
    assert set(domains(probe).values()) == {"0000:01:00"}


def test_a_driver_that_knows_no_links_leaves_them_unknown_and_the_devices_fine() -> None:
    refuses = {"nvmlDeviceGetNvLinkState": pynvml.NVML_ERROR_NOT_SUPPORTED}
    (node,) = probe_of(FakeNvml(Part("GPU-1", links=[2], refuses=refuses))).read()
    (device,) = node.devices
    assert (device.nvlink, device.numa, device.suspect) == (None, None, None)


def test_a_board_lost_while_its_links_are_looked_at_does_no_harm_to_the_others() -> None:
    refuses = {"nvmlDeviceGetNvLinkState": pynvml.NVML_ERROR_GPU_IS_LOST}
    boards = [Part("GPU-1", bus=1, links=[2], refuses=refuses), Part("GPU-2", bus=2, links=[3])]
    boards.append(Part("GPU-3", bus=3, links=[2]))
    found = domains(probe_of(FakeNvml(*boards)))
    assert found == {"GPU-1": None, "GPU-2": "0000:02:00", "GPU-3": "0000:02:00"}


def test_a_board_belongs_to_the_one_numa_node_that_is_nearest() -> None:
    boards = [Part("GPU-0", numa=0b1), Part("GPU-1", numa=0b10), Part("GPU-any", numa=0b11), Part("GPU-none")]
    expected = {"GPU-0": 0, "GPU-1": 1, "GPU-any": None, "GPU-none": None}
    assert numas(probe_of(FakeNvml(*boards))) == expected


def test_slices_share_their_boards_numa_node_and_have_no_nvlink() -> None:
    split = Part(
        "GPU-split", bus=1, links=[2], numa=0b10, slices=[slice_of("MIG-a", count=1, total_mib=9_856)]
    )
    probe = probe_of(FakeNvml(split, Part("GPU-whole", bus=2, links=[1], numa=0b1)))
    assert domains(probe) == {"MIG-a": None, "GPU-whole": "0000:01:00"}
    assert numas(probe) == {"MIG-a": 1, "GPU-whole": 0}


def test_a_lost_device_keeps_its_place() -> None:
    boards = [Part("GPU-1", bus=1, links=[2], numa=1), Part("GPU-2", bus=2, links=[1], numa=1)]
    nvml = FakeNvml(*boards)
    probe = probe_of(nvml)
    domains(probe)
    nvml.lost.add(0)
    (node,) = probe.read()
    lost = next(device for device in node.devices if device.id == "GPU-1")
    assert lost.suspect and (lost.nvlink, lost.numa) == ("0000:01:00", 0)
