"""The served broker of the server's tests."""

from tests.server.conftest import base_url, broker, client, migrated_database, settings

__all__ = ["base_url", "broker", "client", "migrated_database", "settings"]
