"""Names and objects of other libraries with their equivalents in gradgraph, for error messages.

The libraries are PyTorch, Lightning, Keras, Hugging Face, scikit-learn, PEFT and onnxruntime-training. Messages suggest
the equivalent; nothing is accepted under a foreign name.
"""
