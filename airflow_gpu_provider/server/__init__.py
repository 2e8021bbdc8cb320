"""The broker's edges: HTTP, identity, the leader's loop."""
