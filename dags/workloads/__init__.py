"""The work that the example DAGs put on leased GPUs.

Nothing here is known to the provider: a DAG names a function as "package.module:function", with the
``dags`` folder on the import path. Each package is one workload and can be run without Airflow.
"""
