"""Operators of ai.onnx.ml without a derivative; ``gradgraph.passes.normal.dialects.ml_models`` writes the others."""

from gradgraph.rules.registry import no_gradient

DOMAIN = "ai.onnx.ml"

no_gradient(
    "decision trees are piecewise constant",
    "TreeEnsemble",
    "TreeEnsembleClassifier",
    "TreeEnsembleRegressor",
    domain=DOMAIN,
)
no_gradient("piecewise constant", "Binarizer", domain=DOMAIN)
no_gradient(
    "it looks categories up, and compares them only", "CategoryMapper", "LabelEncoder", "OneHotEncoder", domain=DOMAIN
)
no_gradient("dictionaries carry no gradient", "CastMap", "DictVectorizer", domain=DOMAIN)
no_gradient("dictionaries carry no gradient; read as its matrix of scores", "ZipMap", domain=DOMAIN)
