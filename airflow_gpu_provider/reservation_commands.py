"""`airflow gpu reserve`, `reservations` and `unreserve`: devices for a team or a DAG, ahead of time.

People write times as their own clock shows them; what is sent carries its zone, and every answer names it.
"""

from __future__ import annotations

import argparse
import re
from datetime import datetime, timedelta
from typing import Any

from airflow_gpu_provider.commands import admin_hook, command, parse_seconds, print_rows
from airflow_gpu_provider.exceptions import InvalidRequest
from airflow_gpu_provider.hooks.broker import GpuBrokerHook
from airflow_gpu_provider.rows import ReservationRow
from airflow_gpu_provider.wishes import ReservationBody, UnreserveBody


@command
def reserve(args: argparse.Namespace) -> None:
    """Reserve devices ahead."""
    _check(args)
    body = ReservationBody(
        starts_at=parse_moment(args.start, datetime.now().astimezone()),
        for_s=parse_seconds(args.length),
        team=args.team,
        dag_id=args.dag_id,
        devices=tuple(args.device or ()),
        number=args.number or 0,
        model=args.model,
        reason=args.reason or "",
    )
    row = admin_hook(args).reserve(body)
    print(
        f"Reserved {_asked(row)} for {_owner(row)} from {local(row.starts_at)} until {local(row.ends_at)}: "
        f"reservation {row.id}."
    )
    print(f"Kept now: {', '.join(row.kept) or 'none yet'}.")
    if row.overstays:
        print(f"Others still hold some of them: {', '.join(row.overstays)}.")


def _check(args: argparse.Namespace) -> None:
    """Refuse what the broker would, in the words of the command line."""
    if bool(args.device) == (args.number is not None):
        raise InvalidRequest(
            "A reservation names devices (--device UUID ...) or gives a number of them (--number N, of one "
            "--model or of any): write one of the two.",
            reason="invalid_reservation",
        )
    if args.team is None and args.dag_id is None:
        raise InvalidRequest("Say whom it is for: --team, --dag-id or both.", reason="invalid_reservation")
    for option, text in (("--team", args.team), ("--dag-id", args.dag_id), ("--model", args.model)):
        if text is not None and not text.strip():
            raise InvalidRequest(
                f"{option} is empty: write a name or leave it out.", reason="invalid_reservation"
            )
    if args.device and args.model is not None:
        raise InvalidRequest(
            "--device names the devices, so there is no --model to choose: leave it out, or give --number.",
            reason="invalid_reservation",
        )


@command
def reservations(args: argparse.Namespace) -> None:
    """Print what is reserved ahead."""
    print_rows(args, [_row(each) for each in GpuBrokerHook(args.conn_id).reservations()])


@command
def unreserve(args: argparse.Namespace) -> None:
    """Take a reservation back."""
    done = admin_hook(args).unreserve(UnreserveBody(id=args.reservation))
    if not done:
        raise InvalidRequest(
            f"There is no reservation {args.reservation}; `airflow gpu reservations` lists them.",
            reason="unknown_reservation",
        )
    print(f"Reservation {args.reservation} is taken back.")


def parse_moment(text: str, now: datetime) -> datetime:
    """Return the moment in "now", "in 2h" or an ISO time; one without a zone is of the clock of ``now``."""
    text = text.strip()
    if text == "now":
        return now
    match = re.fullmatch(r"in\s+(\S+)", text)
    try:
        if match:
            return now + timedelta(seconds=parse_seconds(match[1]))
        moment = _parsed(text, now)
        # astimezone, not the offset of now: the clock may be put forward until then
        return moment if moment.tzinfo is not None else moment.astimezone()
    except InvalidRequest:  # a ValueError that has said what is wrong
        raise
    except (OverflowError, ValueError):
        raise _no_moment(f"{text!r} is further away than calendars go", now) from None


def _parsed(text: str, now: datetime) -> datetime:
    try:
        return datetime.fromisoformat(re.sub(r"[zZ]$", "+00:00", text))
    except ValueError:
        raise _no_moment(f"{text!r} is no time", now) from None


def _no_moment(problem: str, now: datetime) -> InvalidRequest:
    return InvalidRequest(
        f"{problem}; write e.g. 'in 2h', 2026-03-01T14:00+01:00, or 2026-03-01T14:00 by the clock of this "
        f"machine (now {now:%Y-%m-%dT%H:%M%z}).",
        reason="invalid_time",
    )


def local(moment: datetime) -> str:
    """Return a time by this machine's clock, with its zone."""
    here = moment.astimezone()
    return f"{here:%Y-%m-%d %H:%M} {here.tzname()} (UTC{here:%z})"


def _asked(row: ReservationRow) -> str:
    return f"{row.number} x {row.model or 'GPU'}" if not row.devices else ", ".join(row.devices)


def _owner(row: ReservationRow) -> str:
    names = (("team", row.team), ("DAG", row.dag_id))
    return " and ".join(f"{kind} {name}" for kind, name in names if name is not None)


def _row(row: ReservationRow) -> dict[str, Any]:
    return {
        "reservation": row.id,
        "state": row.state,
        "for": _owner(row),
        "asked": _asked(row),
        "from": row.starts_at.astimezone().isoformat(timespec="minutes"),
        "until": row.ends_at.astimezone().isoformat(timespec="minutes"),
        "kept": ", ".join(row.kept),
        "overstays": ", ".join(row.overstays),
        "by": row.by,
        "reason": row.reason,
    }
