"""Run an image on leased GPUs of a Kubernetes cluster: one pod on each leased node, all or none.

The lease is asked for, waited for and held as by every operator here, from this worker, which needs no GPU;
the pods are the cluster's. They end with the task, however it ends; when the worker is killed, the next try
goes on with them if its lease still lives. What becomes of them is told by their status
(`kubernetes.pod_failures`).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from airflow_gpu_provider.broker.model import GpuRequest
from airflow_gpu_provider.exceptions import InvalidRequest
from airflow_gpu_provider.kubernetes.gang import Gang, members_of
from airflow_gpu_provider.kubernetes.names import CLUSTER_LABEL, task_label
from airflow_gpu_provider.kubernetes.pod_gang import Override, PodGang, end_task
from airflow_gpu_provider.operators.held_lease import HeldLease
from airflow_gpu_provider.operators.leased import GpuLeasedOperator
from airflow_gpu_provider.wire import ClaimState, ClaimView

if TYPE_CHECKING:
    from datetime import datetime

    from airflow.sdk import Context
    from kubernetes.client import ApiClient

    from airflow_gpu_provider.hooks.broker import GpuBrokerHook

#: from SIGTERM to SIGKILL; less than is left of a lease that was lost
_GRACE_S = 5.0
_MOST_GRACE_S = 60.0


class GpuPodsOperator(GpuLeasedOperator):
    """
    Run a container image on GPUs of a Kubernetes cluster.

    The arguments of `GpuLeasedOperator`, and:

    Each pod gets the GPUs that are leased on its node and the variables of a distributed run: NODE_RANK,
    NNODES, NPROC_PER_NODE, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, as `torchrun` takes them; and GPU_LEASE_ID.

    :param image: image of the container
    :param command: its command; None: the image's
    :param arguments: its arguments; None: the image's
    :param env: more variables
    :param kubernetes_conn_id: connection of the cluster, by whose name a cluster agent reports it
    :param namespace: where the pods run; None: the connection's, else "default"
    :param pod_override: what else the pods should be (volumes, service account, secrets, ...): a V1Pod as
        JSON; node, GPUs, labels and owner stay as leased
    :param start_timeout: longest time until all pods run, seconds
    """

    template_fields: Sequence[str] = (
        *GpuLeasedOperator.template_fields,
        "image",
        "command",
        "arguments",
        "env",
        "namespace",
        "pod_override",
    )
    # The base class builds the request once before this is set.
    kubernetes_conn_id = "kubernetes_default"

    def __init__(
        self,
        *,
        image: str,
        command: Sequence[str] | None = None,
        arguments: Sequence[str] | None = None,
        env: Mapping[str, str] | None = None,
        kubernetes_conn_id: str = "kubernetes_default",
        namespace: str | None = None,
        pod_override: Mapping[str, Any] | None = None,
        start_timeout: float = 600.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.image = image
        self.command = command
        self.arguments = arguments
        self.env = env
        self.kubernetes_conn_id = kubernetes_conn_id
        self.namespace = namespace
        self.pod_override = pod_override
        self.start_timeout = start_timeout
        if not image:
            raise InvalidRequest("image is empty: name the container's image, for example 'train:1'.")
        if self.shared or self.share:
            raise InvalidRequest(
                "shared and share are for tasks on this host: a pod gets whole devices. Ask for a MIG slice "
                "or a time slice by its model instead, such as model='A100-MIG-1g.10gb'."
            )

    def build_request(self) -> GpuRequest:
        """Return what is asked of the broker: devices of the cluster, on whichever nodes."""
        request, cluster = super().build_request(), f"{CLUSTER_LABEL}={self.kubernetes_conn_id}"
        return replace(request, host=None, spares=0, node_labels=request.node_labels | {cluster})

    def run_leased(self, context: Context, lease: HeldLease) -> dict[str, Any]:
        """Run the pods; return what ran where."""
        cluster, namespace = self._cluster()
        gang = self._gang(context, lease)
        pods = PodGang(cluster, namespace, gang, override=self._override(), start_s=self.start_timeout)
        is_over = threading.Event()
        try:
            with pods.running(lambda: min(lease.ends_in_s or _GRACE_S, _MOST_GRACE_S)) as running:
                for member in gang.members:
                    self.log.info("Pod %s/%s on node %s", namespace, gang.pod_name(member), member.node)
                first = running.log(gang.members[0])
                threading.Thread(
                    target=first.tell, args=(lambda line: self.log.info("[0] %s", line), is_over), daemon=True
                ).start()
                running.follow(lambda: _look(lease))
                is_over.wait(1.0)  # its last lines
        finally:
            is_over.set()
        nodes = {gang.pod_name(member): member.node for member in gang.members}
        return {"lease_id": lease.lease_id, "namespace": namespace, "nodes": nodes}

    def _proceed(
        self, context: Context, hook: GpuBrokerHook, view: ClaimView, deadline: datetime | None, **how: Any
    ) -> Any:
        """Wait, then work. Who waits holds no lease: what it left running would hold what it waits for."""
        if view.state is ClaimState.PENDING:
            self._end_earlier_pods(context)
        return super()._proceed(context, hook, view, deadline, **how)

    def _end_earlier_pods(self, context: Context) -> None:
        cluster, namespace = self._cluster()
        try:
            end_task(cluster, namespace, self._task_label(context))
        except Exception as error:  # the broker may grant other GPUs meanwhile
            self.log.warning("Pods of an earlier try, if there are any, could not be deleted: %s", error)

    def _cluster(self) -> tuple[ApiClient, str]:
        """Return a client of the cluster and the namespace for the pods."""
        from airflow.providers.cncf.kubernetes.hooks.kubernetes import KubernetesHook

        hook = KubernetesHook(conn_id=self.kubernetes_conn_id)
        return hook.get_conn(), self.namespace or hook.get_namespace() or "default"

    def _task_label(self, context: Context) -> str:
        key = self.task_key(context)
        return task_label(key.dag_id, key.run_id, key.task_id, key.map_index)

    def _check_host(self, lease: HeldLease) -> None:
        """Any worker will do: the devices are the cluster's."""

    def _gang(self, context: Context, lease: HeldLease) -> Gang:
        key, request = self.task_key(context), self.build_request()
        task = (key.dag_id, key.run_id, key.task_id, key.map_index)
        return Gang(
            lease=lease.lease_id,
            task=self._task_label(context),
            image=self.image,
            members=members_of(
                self.kubernetes_conn_id, [(device.node, device.id) for device in lease.devices]
            ),
            command=tuple(self.command or ()),
            arguments=tuple(self.arguments or ()),
            env={name: str(value) for name, value in (self.env or {}).items()},
            tolerates=request.tolerates,
            cpu_cores=request.cpu_cores,
            memory_mib=request.host_memory_mib,
            annotations={"airflow-gpu-provider/task-key": json.dumps(task)},
        )

    def _override(self) -> Override:
        if not self.pod_override:
            return lambda body: body
        from airflow.providers.cncf.kubernetes.pod_generator import PodGenerator
        from kubernetes.client import ApiClient

        wanted = PodGenerator.deserialize_model_dict(dict(self.pod_override))

        def overridden(body: dict[str, Any]) -> dict[str, Any]:
            merged = PodGenerator.reconcile_pods(PodGenerator.deserialize_model_dict(body), wanted)
            plain: dict[str, Any] = ApiClient().sanitize_for_serialization(merged)
            return plain

        return overridden


def _look(lease: HeldLease) -> None:
    """Raise when the devices are no longer ours, or are being taken back: the pods get SIGTERM then."""
    lease.raise_if_lost()
    lease.raise_if_ending()
