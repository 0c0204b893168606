"""Files that anybody may have written are read here, and nowhere else: JSON, TOML, arrays, archives, ONNX messages.

Each reader ends in a value of known types, or in an UnreadableError of one line, in bounded time and memory.
"""
