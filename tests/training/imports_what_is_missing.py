"""A module of an author who has not installed what it needs."""

import no_such_package_of_ours  # noqa: F401 - that is the mistake


def train(ctx: object) -> None:
    raise AssertionError("never called")
