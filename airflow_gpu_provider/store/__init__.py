"""The broker's tables: the truth about claims and leases, on SQLite or PostgreSQL."""
