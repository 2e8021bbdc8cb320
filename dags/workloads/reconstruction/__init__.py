"""Turn turntable photos of a product into a coloured 3D model.

Three stage functions, each taking a product and returning small figures: ``preprocess`` (find the object in
its photos, check the cameras), ``train`` (optimise a signed distance field and its colours until it renders
to the photos) and ``postprocess`` (mesh, GLB, thumbnail, quality on views that training never saw).
``gallery`` turns a run's summary into a static page. Nothing here imports Airflow.

Read in this order: cameras, photos, segmentation, hull, agreement, preprocess; field, volume, hollows,
train; raster, surface, colouring, quality, postprocess; gallery.
"""
