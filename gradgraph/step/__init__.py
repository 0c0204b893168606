"""The step artefact: its manifest, its folder on disk, the class ``Step``, and its summary.

Steps are built in ``gradgraph.building`` and run in ``gradgraph.runtime``.
"""
