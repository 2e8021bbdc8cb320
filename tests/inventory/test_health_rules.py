"""Rules for suspect devices and for whose a process is."""

from __future__ import annotations

import pytest

from airflow_gpu_provider.inventory.health import (
    HARDWARE_XIDS,
    HealthSigns,
    Process,
    Verdict,
    suspect_reason,
    verdict,
)


def test_a_device_that_supports_no_health_sign_is_trusted() -> None:
    assert suspect_reason(HealthSigns()) is None


def test_a_device_without_errors_is_trusted() -> None:
    assert suspect_reason(HealthSigns(ecc_uncorrected=0, remap_failed=False)) is None


@pytest.mark.parametrize("xid", [13, 31, 43, 45, 68, 69, 109])
def test_an_xid_that_a_program_can_cause_says_nothing_about_the_device(xid: int) -> None:
    assert suspect_reason(HealthSigns(xids=(xid,))) is None


@pytest.mark.parametrize("xid", sorted(HARDWARE_XIDS))
def test_a_hardware_xid_makes_the_device_suspect(xid: int) -> None:
    assert f"XID {xid}" in (suspect_reason(HealthSigns(xids=(31, xid))) or "")


def test_the_gravest_reason_is_told_first() -> None:
    signs = HealthSigns(ecc_uncorrected=1, xids=(48,), lost="GPU is lost")
    assert (suspect_reason(signs) or "").startswith("GPU is lost")


def whose(lease_id: str | None, *, lease: str | None = None, readable: bool = True) -> Verdict:
    process = Process(10, 1, lease_id, readable=readable)
    leases = () if lease is None else (lease, "beside")
    return verdict(process, leases=leases, former=("former",), live={"held", "beside", "elsewhere"})


def test_a_process_of_the_devices_lease_is_its_holder() -> None:
    assert whose("held", lease="held") is Verdict.HOLDER


def test_each_of_those_who_share_a_device_is_its_holder() -> None:
    assert whose("beside", lease="held") is Verdict.HOLDER


def test_a_process_without_a_lease_is_foreign_on_free_and_on_leased_devices() -> None:
    assert whose(None) is Verdict.FOREIGN
    assert whose(None, lease="held") is Verdict.FOREIGN


def test_a_lease_for_another_device_gives_no_right_to_this_one() -> None:
    assert whose("elsewhere", lease="held") is Verdict.FOREIGN


def test_a_process_that_cannot_be_looked_into_is_presumed_the_holder_of_a_leased_device_only() -> None:
    assert whose(None, lease="held", readable=False) is Verdict.HOLDER
    assert whose(None, readable=False) is Verdict.FOREIGN


def test_the_devices_former_lease_is_ended_even_when_it_is_leased_again() -> None:
    assert whose("former") is Verdict.ENDED
    assert whose("former", lease="held") is Verdict.ENDED


def test_a_lease_never_heard_of_is_unproven() -> None:
    assert whose("new") is Verdict.UNPROVEN
