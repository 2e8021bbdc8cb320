"""What a Kubernetes cluster has: watched, counted, told to the broker like the devices of an agent's host.

Importing this package imports nothing else; the official client is imported where a cluster is reached
(`api`). `watch` keeps `mirror` up to date, `slots` works out what is free, `probe` tells it to
`inventory.agent.Agent`.
"""
