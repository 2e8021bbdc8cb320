"""What agents tell the broker about their devices, and what it answers.

Sent once a second for each node. ``None`` is "not supported or unknown", never 0. The next step is
`server.fleet`, which folds reports in memory.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, Field

from airflow_gpu_provider.echo import checked_address
from airflow_gpu_provider.wire import MOST, MOST_GPUS, MOST_MIB, Artifact, Body, Name, no_nul

MOST_ARTIFACTS = 10_000
MOST_LABELS = 100
MOST_LATENCIES = 1000

Latency = Annotated[float, Field(ge=0, le=MOST)]
Share = Annotated[float, Field(ge=0, le=1)]


#: Label of a node whose agent reaches no driver; it says why. Such a node's report names no devices.
NVML_LABEL = "nvml"


class DeviceReport(Body):
    """One device as its agent measured it. ``None`` = not supported or unknown, never 0."""

    id: Name
    model: Name
    memory_mib: int = Field(ge=0, le=MOST_MIB)
    tflops: float = Field(ge=0, le=MOST)
    utilisation: float | None = None
    memory_used_mib: int | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    ecc_uncorrected: int | None = None
    foreign_pids: tuple[int, ...] = ()
    suspect: Annotated[str, AfterValidator(no_nul)] | None = None
    #: why it is not offered though nothing is wrong with it, such as a cordoned node
    unavailable: Annotated[str, AfterValidator(no_nul)] | None = None
    simulated: bool = False
    share: float = Field(default=1.0, gt=0, le=1)  #: of the whole GPU; less for a MIG slice
    nvlink: Name | None = None  #: its NVLink domain, a name unique on the node
    numa: int | None = Field(default=None, ge=0, le=MOST_GPUS)  #: the NUMA node that it is attached to


class NodeReport(Body):
    """One node as its agent measured it."""

    name: Name
    host: Name
    cpu_cores: float = Field(ge=0, le=MOST_GPUS * 1000)
    memory_mib: int = Field(ge=0, le=MOST_MIB)
    load: float | None = None
    #: ``rack`` and ``zone`` say where it stands
    labels: dict[Name, Name] = Field(default_factory=dict, max_length=MOST_LABELS)
    #: news of the latency to other nodes, by name: None = it does not answer, absent = as told before
    latency_ms: dict[Name, Latency | None] = Field(default_factory=dict, max_length=MOST_LATENCIES)
    #: the share of questions without an answer, of those in ``latency_ms`` that lose any
    loss: dict[Name, Share] = Field(default_factory=dict, max_length=MOST_LATENCIES)
    #: where it answers those who measure the latency to it, IP:PORT
    echo_at: Annotated[Name, AfterValidator(checked_address)] | None = None
    devices: tuple[DeviceReport, ...] = ()
    agent_version: str = ""
    #: pretrained models and data sets on its disk, by path or digest; None = as told before
    artifacts: tuple[Artifact, ...] | None = Field(default=None, max_length=MOST_ARTIFACTS)


class ReportBody(Body):
    """What an agent sends once a second: all nodes it speaks for."""

    nodes: tuple[NodeReport, ...]
    peer_plan: Annotated[str, Field(max_length=64)] = ""  #: that of the last answer, "" = none yet


class LeasedDevice(BaseModel):
    """A device under a live lease, told to the agent so that it can tell its holders from outsiders.

    A shared device is told once for each of its leases.
    """

    id: str
    lease_id: str


class ReportAnswer(BaseModel):
    """The broker's answer to a report: which devices are under a live lease, and whom to measure.

    ``peers`` are the addresses of the nodes whose latency is to be measured; None = those of ``peer_plan``,
    which the agent has named.
    """

    leased: list[LeasedDevice] = []
    report_interval_s: float = 1.0
    peers: dict[str, str] | None = None
    peer_plan: str = ""
    echo_key: str = ""  #: of the questions between hosts, in hexadecimal
