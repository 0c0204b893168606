"""Structure-aware mutants of models, manifests, checkpoints and data, each read under limits on time and memory.

``python -m tests.mutation --count 100000 --seed 1`` is the long run; ``test_mutants.py`` runs a sample. A mutant is a
function of the seed and its number, drawn from ``random.Random``, so a finding can be repeated by anybody:
``--only NUMBER``. (Libraries that search for inputs keep examples in a database of their own, and are several times
slower where most of the time is spent in reading.)
"""
