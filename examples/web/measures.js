// Metrics computed from sums over all samples of an evaluation, as gradgraph.step.finishes does in Python.

const columns = (rows, size) =>
  Array.from({ length: rows.length / size }, (_, i) => rows.slice(i * size, (i + 1) * size));
const sum = (values) => values.reduce((a, b) => a + b, 0);
const mean = (values) => sum(values) / values.length;

/**
 * Return counts of a confusion matrix, whose rows are true and columns predicted classes: its rows, and for each class
 * the number of hits, of true samples (`so`) and of predicted samples (`calledSo`).
 */
function counts(sums, [, size]) {
  const rows = columns(sums, size);
  const hits = rows.map((row, i) => row[i]);
  return { rows, hits, so: rows.map(sum), calledSo: rows.map((_, i) => sum(rows.map((row) => row[i]))) };
}

/** Return above / below for each class (0 if below is 0), averaged as scikit-learn does. */
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

/**
 * Return a finish for metrics of several labels per sample, averaged as scikit-learn does. Each label has a table
 * [[true negatives, false positives], [false negatives, true positives]]; `parts` returns numerator and denominator.
 */
const ofLabels =
  (parts) =>
  (sums, _, { average }) => {
    const tables = columns(sums, 4);
    const so = tables.map((t) => t[2] + t[3]);
    const found = tables.map((t, i) => parts(t[3], t[1] + t[3], so[i]));
    if (!sum(sums)) return average === "none" ? tables.map(() => NaN) : NaN;
    if (average === "micro" || average === "binary")
      return sum(found.map(([a]) => a)) / Math.max(sum(found.map(([, b]) => b)), 1);
    const shares = found.map(([a, b]) => (b > 0 ? a / b : 0));
    if (average === "weighted") return sum(shares.map((x, i) => x * so[i])) / Math.max(sum(so), 1);
    return average === "none" ? shares : mean(shares);
  };

/** Return rows of numbers, each the sum of `count` addends that are stored one after the other. */
const addends = (sums, [count, rows, width]) =>
  Array.from({ length: rows }, (_, i) =>
    Array.from({ length: width }, (_, j) =>
      sum(Array.from({ length: count }, (_, k) => sums[(k * rows + i) * width + j])),
    ),
  );

/**
 * Return the sum of squared differences from the mean of t = p + d, from the sums of [1, p, d, p * p, 2 * p * d, d * d]
 * over all samples. A sample t is split into a rounded part p and the rest d, for more precision.
 */
const spread = ([count, pivots, rests, squares, products, restSquares]) =>
  Array.from(count, (n, i) => {
    const size = pivots[i] / (n || 1);
    const unit = size ? 2 ** (Math.floor(Math.log2(Math.abs(size))) - 8) : 1;
    const shift = Math.round(size / unit) * unit;
    const total = pivots[i] - n * shift + rests[i];
    const all = squares[i] - 2 * shift * pivots[i] + n * shift ** 2;
    const shifted = all + (products[i] - 2 * shift * rests[i]) + restSquares[i];
    const found = shifted - total ** 2 / n;
    return Math.abs(found) > 1e-13 * shifted ? found : (0 * n) / n; // a smaller result is a rounding error
  });

/** Return 1 - errors / spread; if all targets are equal, 1 without errors and 0 otherwise, as scikit-learn does. */
const explained = (errors, spreads) =>
  spreads.map((all, i) => (all === 0 ? Number(errors[i] === 0) : 1 - errors[i] / all));

const FINISHES = {
  ratio: ([a, b]) => a / b,
  root: ([a, b]) => Math.sqrt(a / b),
  exponential: ([a, b]) => Math.exp(a / b),
  weighted_ratios: (sums, _, { weights }) => sum(columns(sums, 2).map(([a, b], i) => (weights[i] * a) / (b || 1))),
  r2: (sums, shape) => {
    const [count, total, squares, errors] = columns(sums, sums.length / 4);
    return mean(count.map((n, i) => 1 - errors[i] / (squares[i] - total[i] ** 2 / n)));
  },
  explained_variance: (sums) => {
    const [count, total, squares, errors, squared] = columns(sums, sums.length / 5);
    const part = (all, i, square) => square - all[i] ** 2 / count[i];
    return mean(count.map((_, i) => 1 - part(errors, i, squared[i]) / part(total, i, squares[i])));
  },
  r2_shifted: (sums, shape) => {
    const rows = addends(sums, shape);
    return mean(explained(rows[6], spread(rows)));
  },
  explained_variance_shifted: (sums, shape) => {
    const rows = addends(sums, shape);
    return mean(explained(spread(rows.slice(6)), spread(rows)));
  },
  label_precision: ofLabels((hits, called) => [hits, called]),
  label_recall: ofLabels((hits, called, so) => [hits, so]),
  label_f1: ofLabels((hits, called, so) => [2 * hits, called + so]),
  label_iou: ofLabels((hits, called, so) => [hits, called + so - hits]),
  calibration: (sums) => {
    const [count, probability, hits] = columns(sums, sums.length / 3);
    return sum(hits.map((x, i) => Math.abs(x - probability[i]))) / sum(count);
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
  mcc: (sums, shape) => {
    const { hits, so, calledSo } = counts(sums, shape);
    const [all, dot] = [sum(so), (a, b) => sum(a.map((x, i) => x * b[i]))];
    const below = (all ** 2 - dot(calledSo, calledSo)) * (all ** 2 - dot(so, so));
    return below > 0 ? (sum(hits) * all - dot(so, calledSo)) / Math.sqrt(below) : 0;
  },
  cohen_kappa: (sums, shape, { weights }) => {
    const { rows, so, calledSo } = counts(sums, shape);
    const weight = (i, j) => ({ linear: Math.abs(i - j), quadratic: (i - j) ** 2 })[weights] ?? Number(i !== j);
    const over = (of) => sum(so.map((_, i) => sum(calledSo.map((_, j) => weight(i, j) * of(i, j)))));
    return 1 - over((i, j) => rows[i][j]) / over((i, j) => (so[i] * calledSo[j]) / sum(so));
  },
  roc_auc: (sums, shape, given) => ranked(area, sums, shape, given),
  average_precision: (sums, shape, given) => ranked(meanPrecision, sums, shape, given),
};

/**
 * Split rows of samples into one binary problem [scores, truth] per class (against the rest) or per label. Samples with
 * the label -1 are ignored.
 */
function againstTheRest(sums, shape, probable) {
  const rows = columns(
    sums,
    shape.reduce((a, b) => a * b),
  );
  if (shape.length === 2)
    return Array.from({ length: shape[1] }, (_, i) => {
      const counted = rows.filter((row) => row[shape[1] + i] >= 0);
      return [counted.map((row) => row[i]), counted.map((row) => row[shape[1] + i] > 0)];
    });
  const counted = rows.filter((row) => row[shape[0] - 1] >= 0);
  const scores = counted.map((row) => (probable ? row.slice(0, -1) : softmax(row.slice(0, -1))));
  return Array.from({ length: shape[0] - 1 }, (_, i) => [
    scores.map((row) => row[i]),
    counted.map((row) => row[shape[0] - 1] === i),
  ]);
}

function softmax(row) {
  const highest = Math.max(...row);
  const powers = row.map((x) => Math.exp(x - highest));
  const total = sum(powers);
  return powers.map((x) => x / total);
}

/** Return [positives, negatives] with at least each distinct score, from the highest score to the lowest. */
function steps([scores, truth]) {
  const order = Array.from(scores, (_, i) => i).sort((a, b) => scores[b] - scores[a]);
  const [found, count] = [[], [0, 0]];
  order.forEach((at, i) => {
    count[truth[at] ? 0 : 1] += 1;
    if (i + 1 === order.length || scores[order[i + 1]] !== scores[at]) found.push([...count]);
  });
  return found;
}

function area([scores, truth]) {
  if (truth.every(Boolean) || !truth.some(Boolean) || scores.some(Number.isNaN)) return NaN;
  const found = [[0, 0], ...steps([scores, truth])];
  const [yes, no] = found.at(-1);
  return sum(found.slice(1).map(([y, n], i) => (n - found[i][1]) * (y + found[i][0]))) / (2 * yes * no);
}

function meanPrecision([scores, truth]) {
  if (scores.some(Number.isNaN)) return NaN;
  if (!truth.some(Boolean)) return 0;
  const found = [[0, 0], ...steps([scores, truth])];
  return sum(found.slice(1).map(([y, n], i) => ((y - found[i][0]) * y) / (y + n))) / found.at(-1)[0];
}

function ranked(figure, sums, shape, { average, probable }) {
  const problems = againstTheRest(sums, shape, probable);
  if (average === "micro") return figure([problems.flatMap(([s]) => s), problems.flatMap(([, t]) => t)]);
  if (average === "binary") return figure(problems[Math.min(1, problems.length - 1)]);
  const figures = problems.map(figure);
  if (average === "none") return figures;
  const yes = problems.map(([, truth]) => truth.filter(Boolean).length);
  if (problems.some(([scores]) => scores.some(Number.isNaN))) return NaN;
  const there = figures.map((_, i) => i).filter((i) => yes[i] > 0 && !Number.isNaN(figures[i]));
  if (average !== "weighted") return mean(there.map((i) => figures[i]));
  return sum(there.map((i) => yes[i] * figures[i])) / sum(there.map((i) => yes[i]));
}

/** Compute a measure of the manifest from its sums: a number, a list with one per class, or a confusion matrix. */
export function finished(measure, sums) {
  const finish = FINISHES[measure.finish];
  if (!finish)
    throw new Error(`the metric '${measure.name}' is computed by '${measure.finish}', which is not supported here`);
  return finish([...sums], measure.shape, measure.arguments);
}
