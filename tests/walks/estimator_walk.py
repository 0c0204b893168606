"""A pipeline that ends in our classifier: cross-validated, written as one file, run in bare onnxruntime."""

import onnxruntime
import pandas as pd
from sklearn.compose import make_column_transformer
from sklearn.impute import SimpleImputer
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

import gradgraph.sklearn

frame = pd.read_csv("train.csv")
y = frame.pop("target")
numbers = frame.select_dtypes("number").columns
words = frame.columns.difference(numbers)
columns = make_column_transformer(
    (make_pipeline(SimpleImputer(), StandardScaler()), numbers), (OneHotEncoder(handle_unknown="ignore"), words)
)
pipeline = make_pipeline(columns, gradgraph.sklearn.Classifier(random_state=0))
scores = cross_val_score(pipeline, frame, y, cv=5, scoring="roc_auc")
pipeline.fit(frame, y)

# --- export
gradgraph.sklearn.export(pipeline, "model.onnx", frame)
# --- elsewhere

new = pd.read_csv("new.csv")
session = onnxruntime.InferenceSession("model.onnx")
label, probabilities = session.run(None, {i.name: new[[i.name]].to_numpy() for i in session.get_inputs()})
