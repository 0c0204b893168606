"""Training steps and models as plain C: ``gradgraph.export.c(step, folder)``.

The modules in processing order: ``c_lowering`` (rewrite into operators with C code), ``c_reading`` and ``c_windows``
(nodes to operations), ``grouping`` (operations to loops), ``c_memory`` and ``recomputing`` (order and memory),
``loops`` and ``c_text`` (C text), and ``c_files``. ``program`` defines the shared types, ``operators`` the operator
tables. The package depends on ``backends``, ``passes`` and ``step``.
"""
