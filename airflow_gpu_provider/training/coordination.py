"""The words that supervisor and shards exchange, over one TCPStore that the supervisor hosts.

JSON only: nothing that comes from the network is unpickled. The store has no authentication of its own, so it
listens on loopback and every key lies under a random prefix that only this run's processes are told. No call
here blocks, because all calls of one client wait for each other. Next: `pulse` polls it for a shard.
"""

from __future__ import annotations

import json
import secrets
import socket
from dataclasses import asdict, dataclass, field
from datetime import timedelta

import torch.distributed as dist
from pydantic import JsonValue

_CALL_TIMEOUT = timedelta(seconds=60)
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Control:
    """What the supervisor wants of all shards at this moment."""

    generation: int
    members: dict[str, int]
    finishing: bool = False  #: all steps are done and saved: a new member loads the final checkpoint
    stop: bool = False  #: save at the next synchronisation and leave
    pause: bool = False  #: save at the next synchronisation and wait: ranks are handed over there
    limits: dict[str, int] = field(default_factory=dict)  #: memory in MiB of processes whose limit changed
    sync_interval: int = 0  #: from the next synchronisation on; 0: as it is


class RunStore:
    """JSON values under the run's prefix."""

    def __init__(self, store: dist.Store, prefix: str) -> None:
        self.prefix = prefix
        self._root = store  #: kept: the prefixed view does not own the server
        self._store = dist.PrefixStore(prefix, store)
        self._known: set[str] = set()  #: keys with a value; none is ever deleted

    @classmethod
    def connect(cls, address: str, prefix: str) -> RunStore:
        """Return a client of its own connection; one for each thread."""
        host, port = address.rsplit(":", 1)
        return cls(dist.TCPStore(host, int(port), is_master=False, timeout=_CALL_TIMEOUT), prefix)

    def put(self, key: str, value: JsonValue) -> None:
        """Set a value."""
        self._store.set(key, json.dumps(value))

    def get(self, key: str) -> JsonValue:
        """Return the value, or None when there is none."""
        if key not in self._known:  # asking first would double the cost of every poll
            if not self._store.check([key]):
                return None
            self._known.add(key)
        value: JsonValue = json.loads(self._store.get(key))
        return value

    def has(self, keys: list[str]) -> bool:
        """Say whether all keys have a value."""
        return not keys or bool(self._store.check(keys))

    def below(self, prefix: str) -> dist.Store:
        """Return the raw store below ``prefix``, for torch's own rendezvous."""
        return dist.PrefixStore(prefix, self._store)

    def put_control(self, control: Control) -> None:
        """Tell all shards; one key, so that they never see half a change."""
        self.put("control", asdict(control))

    def get_control(self) -> Control | None:
        """Return the latest word of the supervisor."""
        value = self.get("control")
        return Control(**value) if isinstance(value, dict) else None  # type: ignore[arg-type]


def host_store() -> tuple[RunStore, str]:
    """Start the store on a free loopback port and return it with its address."""
    listener = socket.create_server((LOOPBACK, 0), backlog=1024)
    port = listener.getsockname()[1]
    # A listener of our own, because TCPStore would otherwise listen on every interface.
    store = dist.TCPStore(
        LOOPBACK,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=_CALL_TIMEOUT,
        master_listen_fd=listener.detach(),
    )
    return RunStore(store, secrets.token_hex(16)), f"{LOOPBACK}:{port}"
