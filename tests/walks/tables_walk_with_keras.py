"""The rival of tables_walk.sh: Keras, whose FeatureSpace is Normalization and StringLookup by column."""

import keras
import numpy as np
import pandas as pd
import tensorflow as tf

train, new = pd.read_csv("train.csv"), pd.read_csv("new.csv")
y = train.pop("target")
train.columns = new.columns = train.columns.str.replace("/", "_")  # which names of layers cannot have
numbers = list(train.select_dtypes("number"))
words = [column for column in train if column not in numbers]
means, gaps = train[numbers].mean(), [column for column in numbers if train[column].isna().any()]
for frame in (train, new):  # no layer knows gaps
    frame[words] = frame[words].fillna("")
    frame[[f"no_{column}" for column in gaps]] = frame[gaps].isna().astype("float32")
    frame[numbers] = frame[numbers].astype("float64").fillna(means)
kinds = {c: "float" if c.startswith("no_") else "float_normalized" for c in train if c not in words}
space = keras.utils.FeatureSpace({**kinds, **dict.fromkeys(words, "string_categorical")}, output_mode="concat")
space.adapt(tf.data.Dataset.from_tensor_slices(dict(train)).batch(32))
x = space.get_encoded_features()
for _ in range(2):
    x = keras.layers.Dense(64, activation="relu")(x)
if is_number := y.dtype.kind == "f":
    scale = keras.layers.Normalization(axis=None)
    scale.adapt(y.to_numpy())
    goal, loss = np.asarray(scale(y.to_numpy())), "mse"
    x = keras.layers.Dense(1)(x)
else:
    names = keras.layers.StringLookup(num_oov_indices=0)
    names.adapt(y.to_numpy(str))
    goal, loss = np.asarray(names(y.to_numpy(str))), "sparse_categorical_crossentropy"
    x = keras.layers.Dense(names.vocabulary_size(), activation="softmax")(x)
model = keras.Model(space.get_inputs(), x)
model.compile("adam", loss)
rows = tf.data.Dataset.from_tensor_slices((dict(train), goal)).shuffle(len(train), seed=0)
model.fit(rows.batch(32), epochs=30, verbose=0)
model.save("model.keras")
found = model.predict(tf.data.Dataset.from_tensor_slices(dict(new)).batch(32), verbose=0)
if is_number:
    called = found[:, 0] * y.std(ddof=0) + y.mean()
else:
    called = np.array(names.get_vocabulary())[found.argmax(1)]
pd.DataFrame({"target": called}).to_csv("with_keras.csv", index=False)
