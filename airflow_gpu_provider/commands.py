"""What the commands of `airflow gpu` do."""

from __future__ import annotations

import argparse
import getpass
import re
import sys
from collections.abc import Callable
from typing import Any

from airflow.cli.simple_table import AirflowConsole
from airflow.utils import cli as cli_utils
from airflow.utils.providers_configuration_loader import providers_configuration_loaded
from pydantic import ValidationError

from airflow_gpu_provider.broker.flavor_table import extended
from airflow_gpu_provider.config import Settings
from airflow_gpu_provider.exceptions import GpuProviderError, InvalidRequest
from airflow_gpu_provider.hooks.broker import GpuBrokerHook
from airflow_gpu_provider.shown_rows import (
    device_rows,
    drain_row,
    lease_row,
    queue_row,
    redundancy_row,
    throughput_row,
    until,
)
from airflow_gpu_provider.wire import wrong_fields
from airflow_gpu_provider.wishes import DrainBody, UndrainBody

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def command(function: Callable[[argparse.Namespace], None]) -> Callable[[argparse.Namespace], None]:
    """Load the provider's settings, and end with one sentence instead of a stack trace."""

    @cli_utils.action_cli(check_db=False)  # what they need is the broker, whose database may be another
    @providers_configuration_loaded
    def run(args: argparse.Namespace) -> None:
        try:
            function(args)
        except GpuProviderError as error:
            raise SystemExit(f"{error.message} [{error.reason}]") from None
        except ValidationError as error:
            raise SystemExit(wrong_fields(error)) from None

    return run


@command
def nodes(args: argparse.Namespace) -> None:
    """Print nodes and devices, a row a device."""
    print_rows(args, [row for node in GpuBrokerHook(args.conn_id).nodes() for row in device_rows(node)])


@command
def queue(args: argparse.Namespace) -> None:
    """Print waiting claims."""
    print_rows(args, [queue_row(row) for row in GpuBrokerHook(args.conn_id).queue()])


@command
def leases(args: argparse.Namespace) -> None:
    """Print live leases."""
    print_rows(args, [lease_row(row) for row in GpuBrokerHook(args.conn_id).leases()])


@command
def drains(args: argparse.Namespace) -> None:
    """Print what is drained."""
    print_rows(args, [drain_row(row) for row in GpuBrokerHook(args.conn_id).drains()])


@command
def throughput(args: argparse.Namespace) -> None:
    """Print how fast classes of tasks were on each model."""
    rows = GpuBrokerHook(args.conn_id).throughput()
    print_rows(args, [throughput_row(row) for row in rows if args.task_class in (None, row.task_class)])


@command
def redundancy(args: argparse.Namespace) -> None:
    """Print how many redundant shards trainings get, and why."""
    hook = GpuBrokerHook(args.conn_id)
    is_all = args.task_class is None
    if is_all and args.model is not None:
        print(f"--model {args.model} picks nothing without --task-class: all are shown.", file=sys.stderr)
    rows = hook.redundancies() if is_all else [hook.redundancy(args.task_class, args.model)]
    print_rows(args, [redundancy_row(row) for row in rows])


@command
def drain(args: argparse.Namespace) -> None:
    """Take a node or device out of service."""
    for_s = None if args.length is None else parse_seconds(args.length)
    row = admin_hook(args).drain(DrainBody(target=args.target, reason=args.reason, for_s=for_s))
    print(f"Drained {row.scope} {row.target}{until(row)}; leases that hold it go on.")


@command
def undrain(args: argparse.Namespace) -> None:
    """Put a node or device back into service."""
    if not admin_hook(args).undrain(UndrainBody(target=args.target)):
        raise SystemExit(f"{args.target} is not drained; `airflow gpu drains` shows what is.")
    print(f"Undrained {args.target}.")


def admin_hook(args: argparse.Namespace) -> GpuBrokerHook:
    """Return a client with a token of this moment: who can read the broker's key is an admin."""
    from airflow_gpu_provider.server.auth import mint_token

    key = Settings.load().signing_key()
    who = getpass.getuser()
    return GpuBrokerHook(args.conn_id, token=mint_token(key, role="admin", subject=who, ttl_s=300))


@command
def simulate(args: argparse.Namespace) -> None:
    """Print what would become of tasks."""
    from airflow_gpu_provider import scenes, what_if
    from airflow_gpu_provider.simulation.policies import Rules

    what_if.check_plot(args.plot)
    runtime_s = parse_seconds(args.runtime)
    settings = Settings.load()
    flavors = extended(settings.own_flavors())
    rules = Rules(settings.cycle_policy(), settings.team_quotas())
    scene = scenes.scene(
        GpuBrokerHook(args.conn_id),
        trace=args.trace,
        fleet=args.fleet,
        runtime_s=runtime_s,
        flavors=flavors,
    )
    if scene.assumed:
        note = f"{scene.assumed} tasks promise no max_runtime: taken to run {args.runtime} (--runtime)."
        print(note, file=sys.stderr)
    found = what_if.compare(
        scene, args.policies, add=args.add, dag_id=args.dag_id, flavors=flavors, rules=rules
    )
    is_for_people = args.output in ("table", "plain")
    print_rows(args, what_if.rows_for_people(found) if is_for_people else what_if.rows_for_programs(found))
    what_if.save_plot(args.plot, found)


@command
def token(args: argparse.Namespace) -> None:
    """Print a new broker token, and nothing else, so that scripts can take it."""
    from airflow_gpu_provider.server.auth import mint_token

    print(
        mint_token(
            Settings.load().signing_key(),
            role=args.role,
            subject=args.subject or getpass.getuser(),
            ttl_s=parse_seconds(args.ttl),
            node=args.node,
        )
    )


@command
def broker(args: argparse.Namespace) -> None:
    """Serve the broker until stopped."""
    import uvicorn

    from airflow_gpu_provider.server.airflow_tasks import AirflowTasks
    from airflow_gpu_provider.server.app import create_app, standalone
    from airflow_gpu_provider.server.broker import Broker

    settings = Settings.load()
    settings.signing_key()  # fail here, not at the first request
    app = create_app(lambda: Broker(settings, task_states=AirflowTasks()), people=False)
    # Long-polls are asked again: they must not keep a stopping replica from stopping.
    # A line for each of a thousand calls a second tells nobody anything.
    uvicorn.run(
        standalone(app),
        host=args.host,
        port=args.port,
        log_level="info",
        access_log=False,
        proxy_headers=False,
        timeout_graceful_shutdown=5,
    )


def parse_seconds(text: str) -> float:
    """Return the seconds in e.g. "30d", "12h", "90m" or "600s"."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smhd])\s*", text)
    if match is None:
        raise InvalidRequest(
            f"{text!r} is not a length of time; write a number with s, m, h or d, e.g. 12h.",
            reason="invalid_length",
        )
    return float(match[1]) * _UNITS_S[match[2]]


def print_rows(args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Print rows as the table, JSON or YAML that is asked for."""
    AirflowConsole().print_as(data=rows, output=args.output)
