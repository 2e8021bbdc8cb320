"""What the main DAG refuses before anything runs."""

from __future__ import annotations

import pytest
from airflow.sdk.exceptions import AirflowFailException
from product_catalog_models import PARAMS, refuse_unknown


def test_a_misspelt_parameter_is_refused_with_its_likely_name() -> None:
    with pytest.raises(AirflowFailException, match=r"'catalogue' is no parameter; did you mean 'catalog'\?"):
        refuse_unknown({"catalogue": "/data/catalog.csv"})


def test_known_parameters_pass() -> None:
    refuse_unknown(dict.fromkeys(PARAMS))


def _types(kind: str | list[str]) -> list[str]:
    return [kind] if isinstance(kind, str) else kind


def test_every_number_of_the_form_has_a_largest_value() -> None:
    numbers = [p for p in PARAMS.values() if {"integer", "number"} & set(_types(p.schema["type"]))]
    assert numbers
    assert all("maximum" in p.schema for p in numbers)
