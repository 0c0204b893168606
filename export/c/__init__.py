"""Training steps and models as plain C: ``gradgraph.export.c(step, folder)``.

The rooms of the way, in order: ``lowering`` (operators that have C code), ``reading`` and ``windows`` (nodes to
operations), ``grouping`` (operations to loops), ``plan`` (order and memory), ``loops`` and ``text`` (C), ``writer``
(files). ``program`` has the types that they share, ``operators`` the tables. It depends on ``backends``, ``passes`` and
``step``.
"""
