"""Training in shards that survives the loss of some of them.

Runs where the devices are and imports torch, never Airflow. A supervisor process per run owns membership;
shard processes run the author's ``train(ctx)``; `plan.RunPlan` is all that passes from the operator to them.
"""
