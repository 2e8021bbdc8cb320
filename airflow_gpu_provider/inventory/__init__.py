"""What there is: measure the devices of a host and tell the broker once a second.

Importing this package imports nothing else. `host` names the machine, `nvml` and `simulated` are the
probes, `health` judges, `agent` reports.
"""
