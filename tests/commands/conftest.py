"""The served broker of the server's tests."""

from tests.server.conftest import base_url, broker, client, settings

__all__ = ["base_url", "broker", "client", "settings"]
