"""Lease GPUs to Airflow tasks.

Importing this package imports nothing else: a DAG file pays only for the module it names.
"""

__version__ = "0.1.0"
