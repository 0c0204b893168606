"""Operators of ai.onnx.ml without a gradient; ``passes.normal.dialects.ml_models`` rewrites all others."""

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
    "it only looks up and compares categories", "CategoryMapper", "LabelEncoder", "OneHotEncoder", domain=DOMAIN
)
no_gradient("dictionaries carry no gradient", "CastMap", "DictVectorizer", domain=DOMAIN)
no_gradient("dictionaries carry no gradient; read as its matrix of scores", "ZipMap", domain=DOMAIN)
