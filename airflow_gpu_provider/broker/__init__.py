"""Pure decisions of the broker: no Airflow, no SQL, no HTTP, no clock, no randomness."""
