"""One module for each way to train; each has a class ``Peer`` (see ``benchmarks.worker``)."""
