"""Waiting in the triggerer."""
