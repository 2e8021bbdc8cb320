"""Ends as its argument says, quickly: it imports nothing that takes long."""

import os
import signal
import sys
import time
from pathlib import Path

how, rank = sys.argv[1], int(os.environ["RANK"])
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
print(f"devices {os.environ['CUDA_VISIBLE_DEVICES']!r}", flush=True)
if how == "raise":  # both at once
    raise KeyError("no such column: price")
if how == "network" and rank == 0:  # what a lost peer looks like, told before the peer itself ends
    raise ConnectionResetError("Connection reset by peer")
if rank == 1:
    if how == "network":
        time.sleep(0.5)
        raise ValueError("batch size 0")
    if how == "gpu" and first:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    if how == "stop" and first:
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "always":
        sys.exit(3)
    if how == "save":  # it gets on, a little each time
        folder = Path(os.environ["AGP_CHECKPOINT_DIR"])
        if len(list(folder.iterdir())) < 4:
            (folder / os.environ["TORCHELASTIC_RESTART_COUNT"]).touch()
            os.kill(os.getpid(), signal.SIGKILL)
    if how == "hang":
        time.sleep(3600)
if how == "wait_then_end" and first:
    print("waits", flush=True)
    time.sleep(3600)
if how == "wait":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    print("waits", flush=True)
    time.sleep(3600)
