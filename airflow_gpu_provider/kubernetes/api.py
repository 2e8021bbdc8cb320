"""The API of one cluster through the official client: it connects and identifies, objects are plain JSON.

Its models are not used: they cost milliseconds a pod, and refuse what a newer cluster says. `watch` is built
on this. Errors are the client's `ApiException` and urllib3's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kubernetes.client import ApiClient

_PAGE = 500
_CONNECT_S = 5.0
_ANSWER_S = 30.0


class ClusterApi:
    """Lists and watches collections."""

    def __init__(self, client: ApiClient) -> None:
        self._client = client

    def pages(
        self, path: str, fields: str = "", labels: str = ""
    ) -> Iterator[tuple[list[dict[str, Any]], str]]:
        """Yield a collection in pages, each with the version that a watch may go on from."""
        token = ""
        while True:
            query = {"limit": str(_PAGE), "continue": token, "fieldSelector": fields, "labelSelector": labels}
            with closing(self._get(path, query, _ANSWER_S)) as response:
                page = json.loads(response.data)
            yield page["items"], page["metadata"]["resourceVersion"]
            token = page["metadata"].get("continue") or ""
            if not token:
                return

    def open_watch(
        self, path: str, version: str, *, fields: str, labels: str, lasts_s: int, silent_s: float
    ) -> Watch:
        """Open a watch from ``version``; it fails when nothing at all comes for ``silent_s``."""
        query = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(lasts_s),
            "fieldSelector": fields,
            "labelSelector": labels,
        }
        return Watch(self._get(path, query, silent_s))

    def _get(self, path: str, query: dict[str, str], answer_s: float) -> Any:
        return self._client.call_api(
            path,
            "GET",
            query_params=[(name, value) for name, value in query.items() if value],
            header_params={"Accept": "application/json"},
            auth_settings=["BearerToken"],
            _preload_content=False,
            _return_http_data_only=True,
            _request_timeout=(_CONNECT_S, answer_s),
        )


class Watch:
    """An open watch: its events, one after the other."""

    def __init__(self, response: Any) -> None:
        self._response = response

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield events until the server ends the watch. A line that was cut off is an error."""
        rest = b""
        for piece in self._response.stream(amt=None, decode_content=True):
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                if line.strip():
                    yield json.loads(line)

    def close(self) -> None:
        """End it, also for another thread that waits for the next event."""
        with suppress(ValueError):  # urllib3 says so when there is no connection any more
            self._response.shutdown()
        self._response.close()


def client_of_kubeconfig(file: str | None = None, context: str | None = None) -> ApiClient:
    """Return a client by a kubeconfig file, or by the service account of the pod that this runs in."""
    from kubernetes import client, config

    configuration = client.Configuration()
    if file is None and context is None:
        try:
            config.load_incluster_config(client_configuration=configuration)
            return client.ApiClient(configuration)
        except config.ConfigException:
            configuration = client.Configuration()
    config.load_kube_config(file, context, client_configuration=configuration, persist_config=False)
    return client.ApiClient(configuration)
