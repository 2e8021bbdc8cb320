"""A plain torch script as a training: what is written in the DAG, and the environment each rank gets.

The environment is that of torchrun with one process on each of as many nodes as there are shards: every
process sees its own device only, as device 0, so ``LOCAL_RANK`` is 0. The supervisor hosts the store, as
torchrun's agent does. Nothing is imported here that a DAG file should not import. Next: `script_supervisor`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

from airflow_gpu_provider.exceptions import InvalidRequest

if TYPE_CHECKING:
    from airflow_gpu_provider.training.plan import RunPlan

CHECKPOINT_VARIABLE = "AGP_CHECKPOINT_DIR"
PARAMS_VARIABLE = "AGP_PARAMS"

_MODULE = re.compile(r"-m\s+([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)")
_LAUNCHERS = ("python", "torchrun", "accelerate", "deepspeed", "bash", "sh")
_SHOWN_FILES = 10


class Script(BaseModel):
    """A file or module to run as ``__main__``, once for each rank."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    target: str  #: absolute path of the file, or the module's name
    is_module: bool = False
    args: tuple[str, ...] = ()
    folder: Path  #: in which it is started

    @property
    def command(self) -> tuple[str, ...]:
        """Return what follows the interpreter on the command line."""
        return (*(("-m",) if self.is_module else ()), self.target, *self.args)


def read_script(script: object, args: object, *, dag_folder: Path | None) -> Script:
    """Return the script that the author means, else raise InvalidRequest that says what to write.

    A relative path starts at the folder of the DAG file; ``dag_folder`` is None where that is not known.
    """
    if not isinstance(script, str) or not script.strip():
        raise InvalidRequest(f"script={script!r}: name a file, such as script='train.py'.")
    text = script.strip()
    values = _arguments(args)
    if (module := _MODULE.fullmatch(text)) is not None:
        return Script(target=module[1], is_module=True, args=values, folder=dag_folder or Path.cwd())
    first, *rest = text.split()
    if Path(first).name.rstrip("0123456789.") in _LAUNCHERS:
        raise InvalidRequest(
            f"script={script!r} starts a program; name the Python file alone, since the operator starts it "
            "once for each shard, as torchrun would: script='train.py'."
        )
    if rest and first.endswith(".py"):
        raise InvalidRequest(
            f"script={script!r} has arguments; write script={first!r}, script_args={rest!r}."
        )
    if not text.endswith(".py"):
        raise InvalidRequest(
            f"script={script!r} is neither a Python file (script='train.py') nor a module (script='-m "
            "my_package.train'); for a function write entrypoint='package.module:function'."
        )
    path = Path(text).expanduser()
    if not path.is_absolute():
        path = (dag_folder or Path.cwd()) / path
    return Script(target=str(path), args=values, folder=path.parent)


def check_script_file(script: Script) -> None:
    """Raise InvalidRequest, saying what is there instead, when the script's file does not exist here."""
    path = Path(script.target)
    if script.is_module or path.is_file():
        return
    if not path.parent.is_dir():
        found = f"there is no folder {path.parent}"
    else:
        files = sorted(file.name for file in path.parent.glob("*.py"))
        more = " ..." if len(files) > _SHOWN_FILES else ""
        found = f"{path.parent} has {', '.join(files[:_SHOWN_FILES]) or 'no Python file'}{more}"
    raise InvalidRequest(
        f"script: there is no file {path}; {found}. A relative path starts at the folder of the DAG file; an "
        "absolute one must exist on the worker."
    )


def rank_environment(plan: RunPlan, *, rank: int, port: int, restarts: int) -> dict[str, str]:
    """Return the variables of one rank, beside those of its device and of the supervisor."""
    size = str(plan.shard_count)
    return {
        "RANK": str(rank),
        "WORLD_SIZE": size,
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": str(rank),
        "GROUP_WORLD_SIZE": size,
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": size,
        "ROLE_NAME": "default",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": str(restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(plan.max_respawns),
        "TORCHELASTIC_RUN_ID": plan.run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": str(plan.threads_per_shard),
        "PYTHONUNBUFFERED": "1",
        CHECKPOINT_VARIABLE: str(plan.checkpoint_dir),
        PARAMS_VARIABLE: json.dumps(plan.params),
    }


def _arguments(args: object) -> tuple[str, ...]:
    if args is None:
        return ()
    if isinstance(args, str) or not isinstance(args, Sequence):
        raise InvalidRequest(
            f"script_args={args!r} is one value; write a list of them, such as script_args=['--lr', '0.1']."
        )
    wrong = [arg for arg in args if isinstance(arg, bool) or not isinstance(arg, str | int | float | Path)]
    if wrong:
        raise InvalidRequest(
            f"script_args holds {wrong[0]!r}; a command line is made of texts and numbers: ['--epochs', 3]."
        )
    return tuple(str(arg) for arg in args)
