"""The same with scikit-learn's own perceptron, and skl2onnx as its documentation says."""

from pathlib import Path

import onnxruntime
import pandas as pd
from skl2onnx import to_onnx
from skl2onnx.common.data_types import FloatTensorType, StringTensorType
from sklearn.compose import make_column_transformer
from sklearn.impute import SimpleImputer
from sklearn.model_selection import cross_val_score
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

frame = pd.read_csv("train.csv")
y = frame.pop("target")
numbers = frame.select_dtypes("number").columns
words = frame.columns.difference(numbers)
columns = make_column_transformer(
    (make_pipeline(SimpleImputer(), StandardScaler()), numbers), (OneHotEncoder(handle_unknown="ignore"), words)
)
pipeline = make_pipeline(columns, MLPClassifier(random_state=0))
scores = cross_val_score(pipeline, frame, y, cv=5, scoring="roc_auc")
pipeline.fit(frame, y)

# --- export: numbers as float32, which all steps can have, and probabilities as a matrix
types = [(c, FloatTensorType([None, 1]) if c in numbers else StringTensorType([None, 1])) for c in frame.columns]
model = to_onnx(pipeline, initial_types=types, options={"zipmap": False})
Path("model.onnx").write_bytes(model.SerializeToString())
# --- elsewhere

new = pd.read_csv("new.csv")
session = onnxruntime.InferenceSession("model.onnx")
values = {c: new[[c]].to_numpy().astype("float32" if c in numbers else object) for c in frame.columns}
feeds = {i.name: values[c] for i, c in zip(session.get_inputs(), frame.columns, strict=True)}  # spaces became _
label, probabilities = session.run(None, feeds)
