"""Sensors that wait for what a training depends on."""
