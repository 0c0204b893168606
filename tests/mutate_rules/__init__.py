"""Mutation of rules: are wrong rules caught? ``python -m tests.mutate_rules`` changes each in many small ways.

A mutant is one change in one function of ``gradgraph/rules``: a sign, a term left out, operands swapped, another
operator, a constant, a condition negated, a gradient left out, a mask taken from the output, a float32 copy left out.
The cases and points of the rules that compute the changed expression are tried in the ways of the rule kit and in
float16 (``test_float16.py``), and of composites what looks like them (``near_misses.py``), until one disagrees: the
mutant is caught. One that ends in an error, does not end, or ends the process is caught, too. What no case notices
survives, and is printed; mutants that compute the same are listed with the reason in ``equivalent.py``.

    python -m tests.mutate_rules                          every rule: two hours of one core
    python -m tests.mutate_rules elementwise reduction    two families
    python -m tests.mutate_rules --sample 200 --seed 3    some of all
    python -m tests.mutate_rules reduction --own          a minute: with the cases of this family alone

It ends with status 1 if a mutant survives.
"""
