"""Send reports to the broker over HTTP.

One kept connection, one small JSON body a second. The outcome is told in the words of the error tree:
`BrokerUnavailable` for whatever may heal by itself, `IdentityRefused` for a token that will not. The token is
read again from its file when it is refused, so that a renewed one is taken up without a restart.
"""

from __future__ import annotations

from pathlib import Path

import httpx
from pydantic import ValidationError

from airflow_gpu_provider.broker_address import base_url, not_found_hint, speaks_no_tls, usable_token
from airflow_gpu_provider.exceptions import BrokerUnavailable, IdentityRefused, InvalidRequest
from airflow_gpu_provider.reports import ReportAnswer, ReportBody
from airflow_gpu_provider.wire import API_PREFIX

REPORT_PATH = f"{API_PREFIX}/v1/agents/report"
#: A report is worth little after a few seconds: better give up and send a fresh one.
_TIMEOUT = httpx.Timeout(5.0, connect=2.0)
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


class TokenSource:
    """Where the agent's token comes from."""

    def __init__(self, *, file: Path | None = None, value: str | None = None) -> None:
        self._file = file
        self._value = value

    def read(self) -> str:
        """Return the token as it is now."""
        if self._file is None:
            text, place = self._value or "", "GPU_AGENT_TOKEN"
        else:
            place = str(self._file)
            try:
                text = self._file.read_text(errors="replace")
            except OSError as error:
                raise InvalidRequest(f"The token file {place} cannot be read: {error.strerror}.") from error
        token = usable_token(text)
        if token is None:
            raise InvalidRequest(
                f"There is no broker token in {place}; mint one with `airflow gpu token --role agent` and "
                "pass it by --token-file FILE or the variable GPU_AGENT_TOKEN."
            )
        return token


class HttpReporter:
    """Callable that posts a report and returns the broker's answer."""

    def __init__(self, url: str, token: TokenSource, *, client: httpx.Client | None = None) -> None:
        base = base_url(url, where="--url")
        self._url = base + REPORT_PATH
        self._source = token
        self._token = token.read()
        # A proxy set for the internet would swallow what is meant for this very machine.
        trust_env = httpx.URL(base).host not in _LOOPBACK
        self._client = client or httpx.Client(timeout=_TIMEOUT, trust_env=trust_env)

    def __call__(self, body: ReportBody) -> ReportAnswer:
        """Send; raise `BrokerUnavailable` or `IdentityRefused`."""
        content = body.model_dump_json().encode()
        response = self._post(content)
        if response.status_code in (401, 403):
            renewed = self._source.read()
            if renewed != self._token:
                self._token = renewed
                response = self._post(content)
        if response.status_code in (401, 403):
            raise IdentityRefused(
                f"The broker at {self._url} refused this agent's token ({_words(response)}). Mint another "
                "with `airflow gpu token --role agent`; a token bound to a node may only report that node."
            )
        if response.status_code != 200:
            raise BrokerUnavailable(f"{self._unreported(_words(response))}{_hint(response.status_code)}")
        try:
            return ReportAnswer.model_validate_json(response.content)
        except ValidationError as error:
            raise BrokerUnavailable(
                self._unreported("it answered with something that is no broker's answer; check --url")
            ) from error

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def _post(self, content: bytes) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"}
        try:
            return self._client.post(self._url, content=content, headers=headers)
        except httpx.HTTPError as error:
            if speaks_no_tls(error):
                raise InvalidRequest(
                    f"{self._url} does not speak https at that port: write http:// in --url, or give the "
                    "port of https.",
                    reason="no_tls",
                ) from error
            raise BrokerUnavailable(self._unreported(str(error) or type(error).__name__)) from error

    def _unreported(self, why: str) -> str:
        return f"Devices not reported to {self._url}: {why}."


def _hint(status: int) -> str:
    return not_found_hint(status) or {
        422: " Agent and broker may be of different versions: update the older one.",
    }.get(status, "")


def _words(response: httpx.Response) -> str:
    """Return the status and what the broker says about it, or the first words of whatever answered."""
    try:
        text = str(response.json()["detail"]["message"])
    except (ValueError, KeyError, TypeError):
        text = response.text
    text = " ".join(text.split())[:200].rstrip(".")
    return f"HTTP {response.status_code}{': ' + text if text else ''}"
