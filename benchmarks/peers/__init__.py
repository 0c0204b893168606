"""One module per library, each with a class ``Peer`` (see ``benchmarks.job``)."""
