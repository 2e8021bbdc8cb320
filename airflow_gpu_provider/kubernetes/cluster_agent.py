"""Command line of the cluster agent: ``python -m airflow_gpu_provider.kubernetes.cluster_agent``.

One process for one or more clusters, anywhere that reaches their API servers and the broker; it needs no
Airflow (`airflow gpu cluster-agent` takes clusters from Airflow's connections instead). It runs until a
signal. Two of them may watch the same cluster under the same name: they report the same. Exit codes as of the
agent of a host.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from airflow_gpu_provider.exceptions import BrokerUnavailable, IdentityRefused, InvalidRequest
from airflow_gpu_provider.inventory.agent import Agent, Report
from airflow_gpu_provider.inventory.agent_cli import StopSignal
from airflow_gpu_provider.inventory.reporter import HttpReporter, TokenSource
from airflow_gpu_provider.kubernetes.api import ClusterApi, client_of_kubeconfig
from airflow_gpu_provider.kubernetes.leftovers import PodLeftovers, ender
from airflow_gpu_provider.kubernetes.metrics import Metrics
from airflow_gpu_provider.kubernetes.mirror import ClusterMirror
from airflow_gpu_provider.kubernetes.probe import ClusterProbe, ClusterProbes
from airflow_gpu_provider.kubernetes.sparing import SparingReports
from airflow_gpu_provider.reports import ReportAnswer, ReportBody

if TYPE_CHECKING:
    from kubernetes.client import ApiClient

_LIST_S = 30.0

log = logging.getLogger(__name__)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that do not say which clusters."""
    add = parser.add_argument
    add("--url", help="the broker, such as http://localhost:8080 (what comes before /gpu/v1/…)")
    add("--token-file", type=Path, help="file with the agent's token; else the variable GPU_AGENT_TOKEN")
    add("--namespace", action="append", default=[], help="count pods of this namespace only; may be given "
        "several times; default: all, which needs the right to watch pods in all")  # fmt: skip
    add("--dcgm", default="exporters", metavar="WHERE", help="what the GPUs do: 'exporters' asks each node's "
        "DCGM exporter, an address like http://prometheus:9090 that Prometheus; 'none'")  # fmt: skip
    add(
        "--end-leftovers",
        action="store_true",
        help="delete pods whose lease has ended, if their task did not",
    )
    add("--once", action="store_true", help="report once and exit")
    add("--print", action="store_true", help="also print each report as JSON; with --once needs no --url")


def main(argv: Sequence[str] | None = None) -> int:
    """Run for the cluster of a kubeconfig, or the one that this process runs in; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m airflow_gpu_provider.kubernetes.cluster_agent",
        description="Tell the broker which GPUs a Kubernetes cluster has and which are free.",
    )
    add_options(parser)
    parser.add_argument("--name", required=True, help="what the broker shall call the cluster")
    parser.add_argument("--kubeconfig", help="file; default: the pod's service account, else as of kubectl")
    parser.add_argument("--context", help="context of the kubeconfig")
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # one line a second would hide ours
    try:
        return run({options.name: _client(options)}, options)
    except (InvalidRequest, IdentityRefused) as error:
        print(f"gpu cluster agent: {error.message}", file=sys.stderr)
        return 2
    except BrokerUnavailable as error:  # only --once lets it through
        print(f"gpu cluster agent: {error.message}", file=sys.stderr)
        return 1


def run(clients: Mapping[str, ApiClient], options: argparse.Namespace) -> int:
    """Watch clusters by name and report them until a signal; return the exit code."""
    report = _report(options)
    metrics = _metrics(options.dcgm)
    with ExitStack() as ending:
        probes = []
        for name, client in clients.items():
            probe = ClusterProbe(name, ClusterApi(client), namespaces=options.namespace, metrics=metrics)
            probe.start()
            ending.callback(probe.stop)
            probes.append(probe)
        leftovers = None
        if options.end_leftovers:
            leftovers = PodLeftovers({p.name: (p.mirror, ender(clients[p.name])) for p in probes})
        agent = Agent(ClusterProbes(probes), SparingReports(report), leftovers=leftovers)
        if not options.once:
            agent.run(StopSignal().wait)
            return 0
        for probe in probes:
            if not probe.wait_listed(_LIST_S):
                log.error("Cluster %s was not listed within %g s; the log says why", probe.name, _LIST_S)
                return 1
        agent.step()
    return 0


def _client(options: argparse.Namespace) -> ApiClient:
    from kubernetes.config import ConfigException

    try:
        return client_of_kubeconfig(options.kubeconfig, options.context)
    except ConfigException as error:
        raise InvalidRequest(
            f"There is no way to the cluster {options.name}: {error}. Name a file by --kubeconfig, or run "
            "this in a pod with a service account."
        ) from error


def _metrics(where: str) -> Callable[[ClusterMirror], Metrics] | None:
    if where == "none":
        return None
    if where == "exporters":
        return Metrics
    if where.startswith(("http://", "https://")):
        return lambda mirror: Metrics(mirror, prometheus=where)
    raise InvalidRequest(
        f"--dcgm is {where!r}; allowed are 'exporters', 'none' and the address of a Prometheus."
    )


def _report(options: argparse.Namespace) -> Report:
    if not options.url and not (options.print and options.once):
        raise InvalidRequest("--url is missing; without a broker only --once --print is possible.")
    send: Report = lambda body: ReportAnswer()  # noqa: E731
    if options.url:
        token = TokenSource(file=options.token_file, value=os.environ.get("GPU_AGENT_TOKEN"))
        send = HttpReporter(options.url, token)
    if not options.print:
        return send

    def printed(body: ReportBody) -> ReportAnswer:
        print(body.model_dump_json(), flush=True)
        return send(body)

    return printed


if __name__ == "__main__":
    sys.exit(main())
