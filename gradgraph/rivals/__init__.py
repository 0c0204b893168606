"""The names and objects of other libraries, and their equivalents here.

It knows the names in PyTorch, Lightning, Keras, Hugging Face, scikit-learn, PEFT and onnxruntime-training, but not what
anything here does: error messages use it, and nothing is accepted under a foreign name.
"""
