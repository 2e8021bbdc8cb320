"""`airflow gpu …`: declared here, done in `commands`.

Airflow loads this file for every one of its commands, so it imports nothing but Airflow's own declarations.
"""

from __future__ import annotations

from airflow.cli.cli_config import (
    ARG_OUTPUT,
    ARG_VERBOSE,
    ActionCommand,
    Arg,
    GroupCommand,
    lazy_load_command,
)

_COMMANDS = "airflow_gpu_provider.commands"
_RESERVING = "airflow_gpu_provider.reservation_commands"
_CLUSTERS = "airflow_gpu_provider.cluster_commands"

_CONN_ID = Arg(("--conn-id",), help="Connection of type gpu (default: gpu_default)", default="gpu_default")
_ROLE = Arg(("--role",), help="task (tasks and triggers), agent or admin", required=True)
_SUBJECT = Arg(("--subject",), help="Who carries the token, shown in logs", default=None)
_TTL = Arg(("--ttl",), help="How long the token is valid, e.g. 30d, 12h, 600s (default: 30d)", default="30d")
_NODE = Arg(("--node",), help="The only node an agent with this token may report", default=None)
_TARGET = Arg(("target",), help="Name of a node, or UUID of a device")
_REASON = Arg(("--reason",), help="Why, for those who wonder later", required=True)
_FOR = Arg(
    ("--for",), dest="length", help="End by itself after e.g. 2h; default: until undrained", default=None
)
_TASK_CLASS = Arg(
    ("--task-class",), help="Only of this class of tasks, e.g. dag_id.task_id (default: all)", default=None
)
_MODEL = Arg(("--model",), help="Of that class on this GPU model, e.g. A100", default=None)
_TEAM = Arg(("--team",), help="The team that they are for", default=None)
_FOR_DAG = Arg(("--dag-id",), help="The DAG that they are for; with --team: of that team", default=None)
_DEVICES = Arg(("--device",), help="UUIDs of devices", nargs="+", default=None)
_NUMBER = Arg(("--number",), help="So many devices instead, whichever can be had", type=int, default=None)
_MODEL_OF = Arg(("--model",), help="With --number: of this model (default: of any)", default=None)
_FROM = Arg(
    ("--from",),
    dest="start",
    help="now, 'in 2h', or e.g. 2026-03-01T14:00+01:00; without a zone by the clock of this machine",
    required=True,
)
_LENGTH = Arg(("--for",), dest="length", help="How long, e.g. 8h", required=True)
_WHY = Arg(("--reason",), help="Why, for those who wonder later", default=None)
_RESERVATION = Arg(("reservation",), help="The name that `airflow gpu reservations` shows")
_TRACE = Arg(
    ("--trace",),
    help="CSV or JSON lines of tasks (docs/simulate.md); default: the present queue",
    default=None,
)
_FLEET = Arg(("--fleet",), help='Run the trace on this fleet instead, e.g. "64x(8xA100-80GB)"', default=None)
_ADD = Arg(("--add",), help="Also run on the fleet with these devices added, e.g. 16xA100", default=None)
_POLICIES = Arg(
    ("--policies",),
    help="Which to compare: ours, measured, fifo, pools, tflops (default: ours)",
    default="ours",
)
_DAG = Arg(("--dag-id",), help="Figures of the tasks of this DAG only; all others run as well", default=None)
_RUNTIME = Arg(
    ("--runtime",), help="How long those run that promise no max_runtime (default: 1h)", default="1h"
)
_PLOT = Arg(("--plot",), help="Save a plot as .png, .svg or .html; needs matplotlib", default=None)
_CLUSTER_CONNS = Arg(
    ("--kubernetes-conn-id",),
    help="Connections of type kubernetes, by whose names the broker knows the clusters",
    nargs="+",
    required=True,
)
_URL = Arg(
    ("--url",), help="The broker, e.g. http://localhost:8080 (what comes before /gpu/v1/...)", default=None
)
_TOKEN_FILE = Arg(
    ("--token-file",), help="File with the agent's token; else the variable GPU_AGENT_TOKEN", default=None
)
_NAMESPACES = Arg(
    ("--namespace",), help="Count pods of these namespaces only (default: all)", nargs="+", default=[]
)
_DCGM = Arg(
    ("--dcgm",),
    help="exporters, none, or the address of a Prometheus (default: exporters)",
    default="exporters",
)
_END_LEFTOVERS = Arg(
    ("--end-leftovers",), help="Delete pods whose lease has ended, if their task did not", action="store_true"
)
_ONCE = Arg(("--once",), help="Report once and exit", action="store_true")
_PRINT = Arg(("--print",), help="Also print each report as JSON", action="store_true")
_HOST = Arg(("--host",), help="Address to listen on (default: 127.0.0.1)", default="127.0.0.1")
_PORT = Arg(("--port",), help="Port to listen on (default: 8793)", type=int, default=8793)


def get_cli_commands() -> list[GroupCommand]:
    """Return the commands of the provider."""
    return [
        GroupCommand(
            name="gpu",
            help="Lease GPUs to tasks",
            subcommands=(
                _command("nodes", "Show nodes and devices", _CONN_ID, ARG_OUTPUT),
                _command("queue", "Show waiting claims, next first", _CONN_ID, ARG_OUTPUT),
                _command("leases", "Show live leases", _CONN_ID, ARG_OUTPUT),
                _command("drains", "Show what is drained", _CONN_ID, ARG_OUTPUT),
                _command(
                    "throughput",
                    "Show how fast classes of tasks were on each GPU model",
                    _TASK_CLASS,
                    _CONN_ID,
                    ARG_OUTPUT,
                ),
                _command(
                    "redundancy",
                    "Show how many redundant shards trainings get, and why",
                    _TASK_CLASS,
                    _MODEL,
                    _CONN_ID,
                    ARG_OUTPUT,
                ),
                _command(
                    "drain",
                    "Take a node or device out of service; leases that hold it go on",
                    _TARGET,
                    _REASON,
                    _FOR,
                    _CONN_ID,
                ),
                _command("undrain", "Put a node or device back into service", _TARGET, _CONN_ID),
                _command(
                    "reservations",
                    "Show what is reserved ahead, which devices are kept and who overstays",
                    _CONN_ID,
                    ARG_OUTPUT,
                    module=_RESERVING,
                ),
                _command(
                    "reserve",
                    "Keep devices for a team or a DAG for some time ahead",
                    _TEAM,
                    _FOR_DAG,
                    _DEVICES,
                    _NUMBER,
                    _MODEL_OF,
                    _FROM,
                    _LENGTH,
                    _WHY,
                    _CONN_ID,
                    module=_RESERVING,
                ),
                _command("unreserve", "Take a reservation back", _RESERVATION, _CONN_ID, module=_RESERVING),
                _command(
                    "simulate",
                    "Tell when tasks will be done, here or with more devices, by the broker or without",
                    _TRACE,
                    _FLEET,
                    _ADD,
                    _POLICIES,
                    _DAG,
                    _RUNTIME,
                    _PLOT,
                    _CONN_ID,
                    ARG_OUTPUT,
                ),
                _command("token", "Mint a broker token", _ROLE, _SUBJECT, _TTL, _NODE),
                _command(
                    "cluster-agent",
                    "Tell the broker which GPUs Kubernetes clusters have and which are free",
                    _CLUSTER_CONNS,
                    _URL,
                    _TOKEN_FILE,
                    _NAMESPACES,
                    _DCGM,
                    _END_LEFTOVERS,
                    _ONCE,
                    _PRINT,
                    module=_CLUSTERS,
                ),
                _command("broker", "Serve the broker alone, without Airflow's API server", _HOST, _PORT),
            ),
        )
    ]


def _command(name: str, text: str, *args: Arg, module: str = _COMMANDS) -> ActionCommand:
    """Return a command that is done by the function of its name."""
    function = lazy_load_command(f"{module}.{name.replace('-', '_')}")
    return ActionCommand(name=name, help=text, func=function, args=(*args, ARG_VERBOSE))
