// Columns of an evaluation that are made of sums over all samples: what gradgraph.finishes does in Python.

const columns = (rows, size) =>
  Array.from({ length: rows.length / size }, (_, i) => rows.slice(i * size, (i + 1) * size));
const sum = (values) => values.reduce((a, b) => a + b, 0);
const mean = (values) => sum(values) / values.length;

/** Of a confusion matrix, whose rows are true classes and whose columns are predicted ones. */
function counts(sums, [, size]) {
  const rows = columns(sums, size);
  const hits = rows.map((row, i) => row[i]);
  return { rows, hits, so: rows.map(sum), calledSo: rows.map((_, i) => sum(rows.map((row) => row[i]))) };
}

/** A share of each class, 0 where there is nothing, averaged as scikit-learn does. */
function averaged({ rows, so, calledSo }, above, below, average) {
  const shares = above.map((x, i) => (below[i] > 0 ? x / below[i] : 0));
  if (average === "none") return shares;
  if (average === "binary") return shares[1];
  if (average === "micro") return sum(above) / sum(below);
  if (average === "weighted") return sum(shares.map((x, i) => x * so[i])) / sum(rows.flat());
  return mean(shares.filter((_, i) => so[i] + calledSo[i] > 0));
}

const ofClasses =
  (above, below) =>
  (sums, shape, { average }) => {
    const c = counts(sums, shape);
    return averaged(c, above(c), below(c), average);
  };

const FINISHES = {
  ratio: ([a, b]) => a / b,
  root: ([a, b]) => Math.sqrt(a / b),
  exponential: ([a, b]) => Math.exp(a / b),
  weighted_ratios: (sums, _, { weights }) => sum(columns(sums, 2).map(([a, b], i) => (weights[i] * a) / (b || 1))),
  r2: (sums, shape) => {
    const [count, total, squares, errors] = columns(sums, sums.length / 4);
    return mean(count.map((n, i) => 1 - errors[i] / (squares[i] - total[i] ** 2 / n)));
  },
  confusion: (sums, shape) => columns(sums, shape[1]),
  precision: ofClasses(
    (c) => c.hits,
    (c) => c.calledSo,
  ),
  recall: ofClasses(
    (c) => c.hits,
    (c) => c.so,
  ),
  f1: ofClasses(
    (c) => c.hits.map((x) => 2 * x),
    (c) => c.so.map((x, i) => x + c.calledSo[i]),
  ),
  iou: ofClasses(
    (c) => c.hits,
    (c) => c.so.map((x, i) => x + c.calledSo[i] - c.hits[i]),
  ),
  balanced_accuracy: (sums, shape) => {
    const c = counts(sums, shape);
    return mean(c.hits.map((x, i) => x / (c.so[i] || 1)).filter((_, i) => c.so[i] > 0));
  },
};

/** A measure of the manifest from its sums: a number, a list of one for each class, or a confusion matrix. */
export function finished(measure, sums) {
  const finish = FINISHES[measure.finish];
  if (!finish) throw new Error(`'${measure.name}' is finished by '${measure.finish}', which is unknown here`);
  return finish([...sums], measure.shape, measure.arguments);
}
