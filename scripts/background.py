"""`make up` and `make down`: the same stack as the demo's, kept running for the browser.

Invariant: `down` returns only when no process of the stack is left, and works on whatever an earlier start,
a demo or a crash left behind.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from scripts import fleet, ports
from scripts.airflow_home import ROOT, USER, AirflowHome
from scripts.errors import StackError
from scripts.stack import Stack, StackOptions

USUAL_PORT = 8080  # Airflow's own; taken when it is free and no other is asked for


def up(home: AirflowHome, port: int | None) -> None:
    """Start the stack unless it runs already, wait until it is ready, say how to reach it."""
    if port is None and ports.is_free(USUAL_PORT):
        port = USUAL_PORT
    stack = Stack(StackOptions(home=home, port=port, detached=True))
    try:
        if not stack.is_in_background:
            print("starting Airflow and the GPU broker (about a minute)", flush=True)
            stack.start()
        stack.wait_ready()
    except BaseException:
        if stack.is_ours:
            stack.stop()
        raise
    print(fleet.announcement(stack.broker("admin").nodes()))
    print(f"address   {stack.url}\nuser      {USER}\npassword  {home.secrets().password}")
    airflow = Path(sys.executable).with_name("airflow")
    print(f"logs      {home.logs}\ncommands  . {home.shell_file} && {airflow} gpu nodes")
    print("end it with `make down`")


def down(home: AirflowHome) -> None:
    """End the stack, running or left over."""
    stack = Stack(StackOptions(home=home))
    was_running = stack.is_running
    stack.stop()
    print("the stack has ended" if was_running else "no stack was running")


def main() -> int:
    """Run the command; return the exit code."""
    parser = argparse.ArgumentParser(description="Keep the demo's stack running, or end it.")
    parser.add_argument("command", choices=("up", "down"))
    parser.add_argument("--port", type=int)
    parser.add_argument("--home", type=Path, default=ROOT / ".demo" / "airflow")
    arguments = parser.parse_args()
    home = AirflowHome(arguments.home)
    try:
        up(home, arguments.port) if arguments.command == "up" else down(home)
    except StackError as error:
        print(f"{arguments.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{arguments.command}: interrupted; nothing is left running", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
