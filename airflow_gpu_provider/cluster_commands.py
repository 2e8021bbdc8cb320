"""`airflow gpu cluster-agent`: clusters by Airflow's connections.

The connection's name is the cluster's: nodes are reported as ``CONN_ID/NODE``. All else is as in
`kubernetes.cluster_agent`, which needs no Airflow.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from airflow_gpu_provider.commands import command


@command
def cluster_agent(args: argparse.Namespace) -> None:
    """Report clusters until stopped."""
    from airflow.providers.cncf.kubernetes.hooks.kubernetes import KubernetesHook

    from airflow_gpu_provider.kubernetes.cluster_agent import run

    args.token_file = args.token_file and Path(args.token_file)
    clients = {conn_id: KubernetesHook(conn_id=conn_id).get_conn() for conn_id in args.kubernetes_conn_id}
    raise SystemExit(run(clients, args))
