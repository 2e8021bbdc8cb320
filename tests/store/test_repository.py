from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from airflow_gpu_provider.exceptions import LeaseLost
from airflow_gpu_provider.store.repository import Repository
from airflow_gpu_provider.wire import ReleaseBody
from tests.stored_rows import claims, counts, pending

from .conftest import NOW, body

Grant = Callable[..., None]


def test_the_same_key_is_the_same_claim(repository: Repository) -> None:
    first = repository.submit(body(), now=NOW, usable=())
    assert repository.submit(body(), now=NOW + timedelta(seconds=5), usable=()) == first
    assert len(pending(repository)) == 1


def test_two_acquires_racing_with_one_key_give_one_claim(repository: Repository) -> None:
    with ThreadPoolExecutor(8) as pool:
        ids = list(pool.map(lambda _: repository.submit(body(), now=NOW, usable=()), range(16)))
    assert len(set(ids)) == 1


def test_a_later_try_cancels_the_pending_claim_of_the_earlier_one(repository: Repository) -> None:
    first = repository.submit(body(try_number=1), now=NOW, usable=())
    second = repository.submit(body(try_number=2), now=NOW, usable=())
    assert [row.id for row in pending(repository)] == [second]
    (row,) = claims(repository, [first])
    assert (row.state, row.reason_code) == ("cancelled", "superseded")


def test_a_retry_takes_over_the_lease_of_the_killed_try_and_fences_it(
    repository: Repository, grant: Grant
) -> None:
    first = repository.submit(body(try_number=1), now=NOW, usable=())
    grant(first, "GPU-a")
    held = repository.lease_of(first, now=NOW, ttl_s=30)
    assert held is not None
    second = repository.submit(body(try_number=2), now=NOW, usable={"GPU-a"})
    passed_on = repository.lease_of(second, now=NOW, ttl_s=30)
    assert passed_on is not None
    assert (passed_on.row.id, passed_on.row.epoch, passed_on.devices) == (held.row.id, 2, ("GPU-a",))
    assert len(repository.live_leases()) == 1
    with pytest.raises(LeaseLost, match=r"epoch 2; epoch 1 is over"):
        repository.renew(held.row.id, 1, now=NOW, ttl_s=30)


@pytest.mark.parametrize("usable, gpus", [((), 1), (("GPU-a",), 2)], ids=["device suspect", "other request"])
def test_a_retry_does_not_take_over_what_does_not_fit_it(
    repository: Repository, grant: Grant, usable: tuple[str, ...], gpus: int
) -> None:
    first = repository.submit(body(try_number=1), now=NOW, usable=())
    grant(first, "GPU-a")
    second = repository.submit(body(try_number=2, gpus=gpus), now=NOW, usable=usable)
    assert repository.live_leases() == []
    assert [row.id for row in pending(repository)] == [second]


def test_a_device_that_failed_is_excluded_on_the_retry(repository: Repository, grant: Grant) -> None:
    first = repository.submit(body(try_number=1), now=NOW, usable=())
    grant(first, "GPU-a", "GPU-b")
    held = repository.lease_of(first, now=NOW, ttl_s=30)
    assert held is not None
    released = ReleaseBody(secret="s", epoch=1, outcome="failed", failed_devices=("GPU-b",))
    repository.release(held.row.id, released, now=NOW, device_of=lambda device: None)
    second = repository.submit(body(try_number=2), now=NOW, usable={"GPU-a", "GPU-b"})
    (row,) = claims(repository, [second])
    assert row.excluded == ["GPU-b"]


def test_collecting_starts_the_ttl_and_happens_once(repository: Repository, grant: Grant) -> None:
    claim_id = repository.submit(body(), now=NOW, usable=())
    grant(claim_id, "GPU-a", spares=("GPU-s",))
    later = NOW + timedelta(seconds=60)
    held = repository.lease_of(claim_id, now=later, ttl_s=30)
    assert held is not None
    assert held.row.expires_at == later + timedelta(seconds=30)
    assert (held.devices, held.spares, held.nodes) == (("GPU-a",), ("GPU-s",), ("n1",))
    again = repository.lease_of(claim_id, now=later + timedelta(seconds=9), ttl_s=30)
    assert again is not None and again.row.expires_at == held.row.expires_at


def test_an_ended_lease_cannot_be_renewed_and_says_why(repository: Repository, grant: Grant) -> None:
    claim_id = repository.submit(body(), now=NOW, usable=())
    grant(claim_id, "GPU-a")
    held = repository.lease_of(claim_id, now=NOW, ttl_s=30)
    assert held is not None
    assert repository.renew(held.row.id, 1, now=NOW, ttl_s=30).expires_at == NOW + timedelta(seconds=30)
    assert repository.cancel(claim_id, now=NOW, reason="task_failed")
    with pytest.raises(LeaseLost, match="task_failed"):
        repository.renew(held.row.id, 1, now=NOW, ttl_s=30)
    with pytest.raises(LeaseLost, match="knows no lease"):
        repository.renew("nonsense", 1, now=NOW, ttl_s=30)


def test_release_can_be_repeated_and_frees_the_device(repository: Repository, grant: Grant) -> None:
    claim_id = repository.submit(body(), now=NOW, usable=())
    grant(claim_id, "GPU-a")
    held = repository.lease_of(claim_id, now=NOW, ttl_s=30)
    assert held is not None
    for has_ended in (True, False):
        released = ReleaseBody(secret="s", epoch=1)
        found = repository.release(held.row.id, released, now=NOW, device_of=lambda device: None)
        assert found is has_ended
    assert counts(repository) == (0, 0, 0)
    other = repository.submit(body("other"), now=NOW, usable=())
    grant(other, "GPU-a")
    assert counts(repository) == (0, 1, 1)


def test_cancel_withdraws_a_pending_claim_once(repository: Repository) -> None:
    claim_id = repository.submit(body(), now=NOW, usable=())
    assert repository.cancel(claim_id, now=NOW)
    assert not repository.cancel(claim_id, now=NOW)
    assert pending(repository) == []
