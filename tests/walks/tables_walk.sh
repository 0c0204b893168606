# a table, a column to predict, and rows that nobody knows it of
gradgraph train --model mlp --data train.csv --target target --epochs 30 --run runs/one
gradgraph predict runs/one --data new.csv -o predictions.csv
