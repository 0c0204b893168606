"""The step artefact: manifest, step folder, ``Step``, and summaries of a step.

It defines what a step consists of; building and running steps happen elsewhere.
"""
