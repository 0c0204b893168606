"""The rival of tables_walk.sh: scikit-learn's network behind a ColumnTransformer."""

import joblib
import pandas as pd
from sklearn.compose import make_column_selector, make_column_transformer
from sklearn.impute import SimpleImputer
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

train = pd.read_csv("train.csv")
x, y = train.drop(columns="target"), train["target"]
columns = make_column_transformer(
    (make_pipeline(StandardScaler(), SimpleImputer(add_indicator=True)), make_column_selector(dtype_include="number")),
    (OneHotEncoder(handle_unknown="ignore"), make_column_selector(dtype_exclude="number")),
)
network = MLPRegressor if y.dtype.kind == "f" else MLPClassifier
model = make_pipeline(columns, network(hidden_layer_sizes=(64, 64), max_iter=200, random_state=0)).fit(x, y)
joblib.dump(model, "model.joblib")
new = pd.read_csv("new.csv")
pd.DataFrame({"target": model.predict(new)}).to_csv("by_hand.csv", index=False)
