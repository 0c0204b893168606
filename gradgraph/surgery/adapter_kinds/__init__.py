"""The kinds of adapters: each file holds the formula of one, and its merge; ``adapter_table`` lists them."""
