"""The artefact: the manifest, the step folder, and ``Step``, with what is said about a step.

It knows what a step consists of, and nothing of how one is built or run.
"""
