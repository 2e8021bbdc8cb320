"""Operators that hold GPU leases."""
