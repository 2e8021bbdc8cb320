"""Where the broker is and the token to show there, checked before anything is sent.

People paste both. What can never work is refused at once, with what to give instead; a token is never shown,
neither here nor by what sends it. Clients of tasks (`hooks`) and agents (`inventory`) use the same checks.
"""

from __future__ import annotations

import ssl

import httpx

from airflow_gpu_provider.exceptions import InvalidRequest

#: OpenSSL's names for "this port does not speak TLS", older and newer.
_NO_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "UNKNOWN_PROTOCOL", "HTTP_REQUEST")

GIVE_BASE = (
    "Give the URL of the Airflow API server or of `airflow gpu broker`, up to what comes before /gpu/v1, "
    "e.g. http://localhost:8080"
)


def base_url(text: str, *, where: str) -> str:
    """Return the broker's URL without a slash at its end; raise InvalidRequest if it can be none."""
    url = text.strip().rstrip("/")
    try:
        parts = httpx.URL(url)
        is_url = parts.scheme in ("http", "https") and bool(parts.host)
    except httpx.InvalidURL:
        is_url = False
    if not is_url:
        raise InvalidRequest(f"{where} is {text!r}, which is no http(s) URL. {GIVE_BASE}.", reason="no_url")
    return url


def usable_token(text: str | None) -> str | None:
    """Return the token without blanks around it, None when nothing of it can be sent as a token."""
    token = (text or "").strip()
    return token if token and token.isascii() and token.isprintable() and " " not in token else None


def speaks_no_tls(error: BaseException) -> bool:
    """Return whether https was spoken to a port of http."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLError):
            return any(name in str(cause.reason) for name in _NO_TLS)
        cause = cause.__cause__ or cause.__context__
    return False


def not_found_hint(status: int) -> str:
    """Return what to change when something else answers at the address."""
    return f" {GIVE_BASE}." if status in (404, 405) else ""
