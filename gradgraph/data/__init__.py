"""Data: everything that becomes batches of a model's inputs and targets, and the record of its names.

This package reads arrays, tables, images, annotations, texts, sounds and shards. It must not depend on steps, losses or
training.
"""
