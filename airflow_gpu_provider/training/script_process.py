"""Become a rank of a script: ``python -m ...training.script_process PARENT FOLDER COMMAND...``.

The kernel's promise to end this process with the supervisor survives the exec, so that the author's script
needs to know nothing of it. Started by `script_processes`.
"""

from __future__ import annotations

import os
import sys

from airflow_gpu_provider.training.parenthood import end_with_parent


def main(parent_pid: int, folder: str, command: list[str]) -> None:
    """Turn into ``command`` in ``folder``; never returns."""
    end_with_parent(parent_pid)
    os.chdir(folder)  # not before: a file of the author there could take the place of one of Python's own
    os.execv(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
