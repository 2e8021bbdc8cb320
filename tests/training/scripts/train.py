"""A training as people have them: torch.distributed from the environment, DDP, checkpoints, no word of ours.

Rank 1 is killed in the first round, at the step that the argument says.
"""

import argparse
import os
import signal
import subprocess
from pathlib import Path

import torch
import torch.distributed as dist
from neighbour import STEPS, model, samples  # beside this file
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--kill-at", type=int, required=True)
arguments = parser.parse_args()

dist.init_process_group("gloo")
rank = dist.get_rank()
folder = Path(os.environ["AGP_CHECKPOINT_DIR"])
net = model()
trained = DistributedDataParallel(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
begin = 0
if (newest := folder / "newest.pt").exists():
    saved = torch.load(newest)
    begin = saved["step"]
    net.load_state_dict(saved["model"])
print(f"rank {rank} of {dist.get_world_size()} begins at {begin}, local rank {os.environ['LOCAL_RANK']}")
for step in range(begin, STEPS):
    if rank == 1 and step == arguments.kill_at and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        helper = subprocess.Popen(["sleep", "600"])  # that nobody would end
        (folder / "helper").write_text(str(helper.pid))
        os.kill(os.getpid(), signal.SIGKILL)
    x, y = samples(step, rank)
    optimizer.zero_grad()
    mse_loss(trained(x), y).backward()
    optimizer.step()
    if rank == 0:
        torch.save({"step": step + 1, "model": net.state_dict()}, folder / "new.pt")
        (folder / "new.pt").replace(newest)
print("done", end="")  # without a newline, as progress bars leave it
dist.destroy_process_group()
