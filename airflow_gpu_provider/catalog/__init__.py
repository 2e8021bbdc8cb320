"""From a product catalogue to one result per product, in chunks, resumable product by product.

The data flows manifest -> plan (chunks) -> runner (one stage over one chunk) -> ledger, publish -> summary.
Nothing here knows Airflow except `pipeline`, and nothing knows what a stage does: a stage is
``"package.module:function"``.
"""
