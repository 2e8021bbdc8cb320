"""What a script's output tells of its end: the last traceback, and which rank failed first.

A script writes no report, but Python prints one, and torch puts the rank before each of its lines. When one
rank is lost, the others fail because of it; the one that does not speak of the network is the cause. Pure;
used by `script_processes` and `script_supervisor`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from airflow_gpu_provider.training.failures import FailureCause, ShardFailure, ShardReport

_RANK = re.compile(r"^\[rank\d+\]:\s?")
_HEAD = "Traceback (most recent call last):"
_ERROR = re.compile(r"([A-Za-z_][\w.]*)(?::\s?(.*))?")
_MESSAGE_LINES = 5
#: what Python says of a file or module that it cannot begin, with no traceback
_NO_MODULE = re.compile(
    r"\S+: (?:No module named (?P<name>.*)|Error while finding module \S+ for (?P<why>.*))"
)
_NO_FILE = re.compile(r"\S+: can't (?:open file|find '__main__' module) .*")
_FILE = re.compile(r'  File "[^"]*", line \d+')
_SYNTAX_ERRORS = ("SyntaxError", "IndentationError", "TabError")


def error_in(lines: Sequence[str]) -> ShardReport | None:
    """Return the exception that the last traceback in ``lines`` tells, None when there is none."""
    plain = [_RANK.sub("", line) for line in lines]
    heads = [number for number, line in enumerate(plain) if line.strip() == _HEAD]
    if not heads:
        return None
    after = plain[heads[-1] + 1 :]
    start = next((n for n, line in enumerate(after) if line and not line[0].isspace()), None)
    found = None if start is None else _ERROR.fullmatch(after[start])
    if start is None or found is None:
        return None
    more = []
    for line in after[start + 1 : start + _MESSAGE_LINES]:
        if not line.strip():
            break
        more.append(line.strip())
    message = "\n".join([found[2] or "", *more]).strip()
    traceback = "\n".join(plain[heads[-1] : heads[-1] + 1 + start + len(more) + 1])
    return ShardReport(error_type=found[1].rpartition(".")[2], message=message, traceback=traceback[-8000:])


def error_at_the_start(lines: Sequence[str], exit_code: int | None) -> ShardReport | None:
    """Return why Python could not begin to run a script: the same would happen on every device.

    Python tells that last and with an exit code of its own; of a file with a mistake in its syntax it shows
    the line, but no traceback.
    """
    told = [line for line in lines if line.strip()]
    if not told or exit_code not in (1, 2):
        return None
    if _NO_FILE.fullmatch(told[-1]):
        return _report("FileNotFoundError", told[-1])
    if exit_code == 2:
        return None
    if (found := _NO_MODULE.fullmatch(told[-1])) is not None:
        why = f"No module named {found['name']}" if found["name"] else found["why"]
        return _report("ModuleNotFoundError", f"{why}; it must lie on the worker's Python path")
    head, _, message = told[-1].partition(": ")
    at = next((line.strip() for line in reversed(told) if _FILE.fullmatch(line)), None)
    return _report(head, f"{message} ({at})") if head in _SYNTAX_ERRORS and at else None


def _report(error_type: str, message: str) -> ShardReport:
    return ShardReport(error_type=error_type, message=message)


def first_cause(failures: Sequence[ShardFailure]) -> ShardFailure:
    """Return the failure of which the others are consequences: the oldest that is not of the network."""
    return next((each for each in failures if not is_collateral(each)), failures[0])


def is_collateral(failure: ShardFailure) -> bool:
    """Say whether another rank's loss would look like this."""
    return failure.cause is FailureCause.NETWORK
