"""A script as people have them: the device is that of LOCAL_RANK."""

import os

import torch
import torch.distributed as dist

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
one = torch.ones(1, device="cuda")
dist.all_reduce(one)
uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
print(f"sum {one.item()} on GPU-{uuid}, {torch.cuda.device_count()} visible")
dist.destroy_process_group()
