"""What Airflow calls when a task changes its state."""
