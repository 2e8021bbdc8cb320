"""Which interfaces shards talk over."""

from __future__ import annotations

import pytest

from airflow_gpu_provider.exceptions import InvalidRequest
from airflow_gpu_provider.training.interfaces import Interface, chosen, nccl_environment, present_interfaces

LO = Interface("lo", "127.0.0.1", is_up=True, is_loopback=True)
ETH0, ETH1 = Interface("eth0", "10.0.0.1", is_up=True), Interface("eth1", "10.1.0.1", is_up=True)
OTHERS = (Interface("docker0", "172.17.0.1", is_up=True), Interface("eth2", None, is_up=True))
DOWN = Interface("eth3", "10.3.0.1", is_up=False)
PRESENT = (LO, ETH0, ETH1, *OTHERS, DOWN)


def test_one_host_talks_over_loopback_and_several_over_all_that_leads_out() -> None:
    assert chosen(None, None, PRESENT, spans_hosts=False) == ()
    assert chosen(None, None, PRESENT, spans_hosts=True) == (ETH0, ETH1)


def test_the_author_comes_before_the_installation_and_that_before_the_rest() -> None:
    assert chosen(["eth1"], "eth0", PRESENT, spans_hosts=True) == (ETH1,)
    assert chosen(None, "eth1,eth0", PRESENT, spans_hosts=False) == (ETH1, ETH0)


def test_an_interface_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(InvalidRequest, match=r"ib0, eth2 have no address.*eth1 \(10\.1\.0\.1\)"):
        chosen(["ib0", "eth0", "eth2"], None, PRESENT, spans_hosts=True)


def test_nccl_is_told_the_same_interfaces_unless_the_installation_has_said_so() -> None:
    assert nccl_environment((ETH0, ETH1), None, {}) == {"NCCL_SOCKET_IFNAME": "=eth0,eth1"}
    assert nccl_environment((ETH0,), None, {"NCCL_SOCKET_IFNAME": "^lo"}) == {}
    assert nccl_environment((), "mlx5_0", {"NCCL_IB_HCA": "mlx5"}) == {"NCCL_IB_HCA": "mlx5_0"}


def test_the_interfaces_of_this_machine_are_read() -> None:
    found = {each.name: each for each in present_interfaces()}
    assert found["lo"].is_loopback and found["lo"].address == "127.0.0.1" and not found["lo"].leads_out
