"""A BERT-like export learns from a CSV, and says of another CSV what each text is about: the page on texts, typed."""

COMMANDS = """
gradgraph train bert.onnx --data train.csv --tokenizer tokenizer.json --text length=64 --target about --loss cross_entropy --metric accuracy --optimizer adamw --lr 2e-3 --epochs {epochs} --batch-size 32 --run run
gradgraph evaluate run --data test.csv --json
gradgraph predict run --data test.csv -o predicted.csv
"""  # noqa: E501
