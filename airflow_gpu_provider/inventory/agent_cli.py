"""Command line of the agent: ``python -m airflow_gpu_provider.inventory.agent``.

Chooses the probe (real devices, or a simulated fleet that is announced as such), connects it with the
broker and runs until a signal. Exit codes: 0 after a signal or ``--once``, 1 when the broker did not take the
report of ``--once``, 2 when an argument or the token is wrong.
"""

from __future__ import annotations

import argparse
import logging
import os
import select
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from airflow_gpu_provider.broker.flavor_table import extended, parse_flavors
from airflow_gpu_provider.broker.flavors import Flavor
from airflow_gpu_provider.exceptions import BrokerUnavailable, IdentityRefused, InvalidRequest
from airflow_gpu_provider.inventory import host
from airflow_gpu_provider.inventory.agent import Agent
from airflow_gpu_provider.inventory.artifacts import ArtifactShelf
from airflow_gpu_provider.inventory.neighbours import USUAL_PORT, Neighbours, measured_on
from airflow_gpu_provider.inventory.probe import Probe
from airflow_gpu_provider.inventory.reporter import HttpReporter, TokenSource
from airflow_gpu_provider.reports import ReportAnswer, ReportBody

#: The fleet of a machine without GPUs: one node for each class.
AUTO_FLEET = "{host}-a100:2xA100-80GB;{host}-v100:2xV100-32GB"

#: What a report takes.
_LONGEST_LABEL = 250

log = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the agent; return the exit code."""
    options = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # one line a second would hide ours
    try:
        return _run(options)
    except (InvalidRequest, IdentityRefused) as error:
        print(f"gpu agent: {error.message}", file=sys.stderr)
        return 2
    except BrokerUnavailable as error:  # only --once lets it through
        print(f"gpu agent: {error.message}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # whoever read --print has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m airflow_gpu_provider.inventory.agent",
        description="Tell the broker, once a second, what the GPUs of this machine are doing.",
    )
    add = parser.add_argument
    add("--url", help="the broker, such as http://localhost:8080 (what comes before /gpu/v1/…)")
    add("--token-file", type=Path, help="file with the agent's token; else the variable GPU_AGENT_TOKEN")
    add("--host", help="name of this machine; default: GPU_HOST, else the host name")
    add("--node", help="name of its node; default: the host's")
    add("--simulated", metavar="FLEET", help="simulate devices: 2xA100-80GB,2xV100-32GB, or 64x(8xA100); "
        "'auto' = only where there are no real ones")  # fmt: skip
    add("--flavors", type=Path, help="JSON file of GPU models that are not built in, for --simulated; "
        "default: the variable AIRFLOW__GPU__FLAVORS")  # fmt: skip
    add("--faults", type=Path, help="JSON file of faults of simulated devices; read again when it changes")
    add("--artifacts", action="append", default=[], metavar="PATH", help="folder of pretrained models or "
        "data sets, or a pattern that matches them; may be given several times")  # fmt: skip
    add("--label", action="append", default=[], type=_label, metavar="NAME=VALUE", help="label of the nodes, "
        "such as rack=r1 or zone=a; may be given several times")  # fmt: skip
    add("--latency-port", type=_port, default=USUAL_PORT, metavar="PORT", help="UDP port that answers other "
        f"hosts, which measure the latency to this one; default: {USUAL_PORT}; 0: none")  # fmt: skip
    add("--latency-address", metavar="ADDRESS", help="address of this machine under which other hosts reach "
        "that port; default: that of the way to the broker")  # fmt: skip
    add("--interval", type=_seconds, help="seconds between reports; default: what the broker wants, 1.0")
    add("--once", action="store_true", help="report once and exit")
    add("--print", action="store_true", help="also print each report as JSON; needs no --url")
    return parser


def _label(text: str) -> tuple[str, str]:
    name, _, value = (part.strip() for part in text.partition("="))
    if not name or not value or max(len(name), len(value)) > _LONGEST_LABEL:
        raise argparse.ArgumentTypeError(
            f"{text[:100]!r} is no label; write NAME=VALUE, each of 1 to {_LONGEST_LABEL} characters: rack=r1"
        )
    return name, value


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port; from 0 to 65535 are possible")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no number of seconds; from 0.05 to 60 are possible"
        ) from None
    if not 0.05 <= value <= 60:
        raise argparse.ArgumentTypeError(f"{text} s; from 0.05 to 60 are possible")
    return value


def choose_probe(
    simulated: str | None,
    *,
    host_name: str,
    node: str | None,
    faults: Path | None = None,
    flavors: Mapping[str, Flavor] | None = None,
) -> tuple[Probe, str]:
    """Return the probe and the sentence that announces it."""
    from airflow_gpu_provider.inventory.nvml import NvmlProbe

    if simulated is None or simulated == "auto":
        probe = NvmlProbe(node, host_name=host_name)
        count = sum(len(each.devices) for each in probe.read())
        found = f"{count} NVIDIA device(s) on {host_name}" + (f" ({probe.off.sentence})" if probe.off else "")
        if count or simulated is None:
            return probe, f"Reporting {found}."
        simulated, why = AUTO_FLEET.format(host=node or host_name), f" because there are {found}"
    else:
        why = ""
    from airflow_gpu_provider.inventory.fleet_spec import parse_fleet
    from airflow_gpu_provider.inventory.simulated import SimulatedProbe

    nodes = parse_fleet(simulated, base_name=node or host_name, flavors=extended(flavors or {}))
    devices = sum(len(each.devices) for each in nodes)
    return SimulatedProbe(nodes, host_name=host_name, faults=faults), (
        f"SIMULATED fleet{why}: {devices} device(s) on {len(nodes)} node(s), {simulated}. "
        "No GPU is used: what is leased here runs on the CPU."
    )


def _run(options: argparse.Namespace) -> int:
    if not options.url and not (options.print and options.once):
        raise InvalidRequest("--url is missing; without a broker only --once --print is possible.")
    if options.faults and not options.simulated:
        raise InvalidRequest("--faults is for simulated devices; add --simulated.")
    report = _reporter(options)
    probe, announcement = choose_probe(
        options.simulated,
        host_name=options.host or host.local_host(),
        node=options.node,
        faults=options.faults,
        flavors=_flavors(options.flavors),
    )
    # --print is for programs: its output must stay JSON
    print(announcement, file=sys.stderr if options.print else sys.stdout, flush=True)
    shelf, labels = ArtifactShelf(options.artifacts), dict(options.label)
    neighbours = None if options.once else _neighbours(options)
    agent = Agent(
        probe, report, interval_s=options.interval, shelf=shelf, labels=labels, neighbours=neighbours
    )
    if options.once:
        agent.step()
    else:
        agent.run(StopSignal().wait)
    return 0


def _neighbours(options: argparse.Namespace) -> Neighbours:
    return measured_on(options.latency_port, address=options.latency_address, broker_url=options.url)


def _flavors(file: Path | None) -> Mapping[str, Flavor]:
    if file is None:
        return parse_flavors(os.environ.get("AIRFLOW__GPU__FLAVORS", ""))
    try:
        return parse_flavors(file.read_text("utf-8"))
    except OSError as error:
        raise InvalidRequest(f"--flavors {file} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"--flavors {file} is no UTF-8 text (byte {error.start + 1}): save it as JSON in UTF-8."
        ) from error


class _Reporter:
    """Prints and sends, as the options say."""

    def __init__(self, send: HttpReporter | None, *, prints: bool) -> None:
        self._send = send
        self._prints = prints

    def __call__(self, body: ReportBody) -> ReportAnswer:
        if self._prints:
            print(body.model_dump_json(), flush=True)
        return ReportAnswer() if self._send is None else self._send(body)


def _reporter(options: argparse.Namespace) -> _Reporter:
    if not options.url:
        return _Reporter(None, prints=options.print)
    token = TokenSource(file=options.token_file, value=os.environ.get("GPU_AGENT_TOKEN"))
    return _Reporter(HttpReporter(options.url, token), prints=options.print)


class StopSignal:
    """SIGTERM or SIGINT, as something to wait for.

    The handler only writes a byte to a pipe: setting a `threading.Event` from a handler can deadlock when the
    signal arrives while the same thread waits for it.
    """

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def wait(self, seconds: float) -> bool:
        """Wait; return True as soon as a signal has come."""
        ready, _, _ = select.select([self._read], [], [], max(0.0, seconds))
        return bool(ready)

    def _on_signal(self, number: int, _frame: object) -> None:
        os.write(self._write, b"x")
