"""Airflow's own priorities, set from business value."""
