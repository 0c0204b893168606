"""The words and objects of other libraries, and where each lives here.

It knows how PyTorch, Lightning, Keras, Hugging Face, scikit-learn, PEFT and onnxruntime-training call things; it must
not know what anything here does: messages ask it, and nothing is accepted under another name.
"""
