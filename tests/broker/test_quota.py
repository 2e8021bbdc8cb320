"""The setting `[gpu] quotas`: what is read, and what is refused with the words to write instead."""

from __future__ import annotations

import pytest

from airflow_gpu_provider.broker.quota import Quota, Quotas
from airflow_gpu_provider.exceptions import InvalidRequest


def test_quotas_are_read_from_json() -> None:
    assert Quotas.parse(" ") == Quotas()
    text = '{"vision": {"devices": 8, "weight": 2}, "text": {"share": 0.25, "limit": 16}}'
    assert Quotas.parse(text) == Quotas({"vision": Quota(8, weight=2), "text": Quota(share=0.25, limit=16)})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "no JSON"),
        ("[1]", "no JSON object by team"),
        ('{"a": 3}', "quota of team 'a' is 3"),
        ('{"a": {"gpus": 3}}', "devices, limit, share, weight"),
        ('{"a": {"weight": 0}}', "weight of team 'a' is 0: write 0 or more, and a weight above 0"),
        ('{"a": {"devices": true}}', "devices of team 'a' is True"),
        ('{"a": {"devices": -1}}', "devices of team 'a' is -1"),
        ('{"a": {"share": 2}}', "the whole fleet is 1"),
        ('{"a": {"share": 0.5, "devices": 1}}', "give one of them"),
        ('{"a": {"share": 0.6}, "b": {"share": 0.6}}', "add up to 1.2"),
    ],
)
def test_wrong_quotas_are_refused_with_what_to_write(text: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        Quotas.parse(text)
