// Converts labels to class indices by the manifest's record of the training data, as gradgraph/data/record/classes.py does.
import { GradgraphError } from "./errors.js";

const TRUE = ["true", "yes", "y", "t", "on", "1"];
const FALSE = ["false", "no", "n", "f", "off", "0"];
const NUMBER = /^\s*[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?\s*$/i;
const WHOLE = /^(-?(?:0|[1-9]\d*))(?:\.0+)?$/; // a whole number as programs write it: not "01"

const lower = (text) => text.toLowerCase();
const isTruth = (text) => lower(text) === "true" || lower(text) === "false";
const whole = (text) => WHOLE.exec(text)?.[1];
const listed = (names) => [...new Set(names)].slice(0, 9).map((name) => `'${name}'`).join(", ");

/**
 * Return the classes of a target in `manifest.data`: { names, numbered }, where `numbered` is whether the training data
 * had class indices as labels; null if its classes are unknown.
 */
export function classesOf(manifest, target) {
  const { classes = {}, numbered = [] } = manifest.data ?? {};
  return classes[target] ? { names: classes[target], numbered: numbered.includes(target) } : null;
}

/**
 * Return the class index of each label; throw a GradgraphError for a label without a class. Names are matched exactly,
 * and booleans with the class whose name means true or false. A whole number is matched with class names if these look
 * like numbers; otherwise it is a class index.
 *
 * The first argument is the target's entry in the manifest, `classes` the result of `classesOf`, and `labels` a list of
 * text, booleans or numbers.
 */
export function numbersOf({ name: where, ignore_index: ignored = null }, classes, labels) {
  const { names = [], numbered = false } = classes ?? {};
  const places = new Map(names.map((name, i) => [name, i]));
  const known = listed(names) || "class indices, without names";
  const refuse = (why) => new GradgraphError(`'${where}' ${why}; the model has ${known}`);
  const areBooleans = labels.every((label) => typeof label === "boolean");
  const hasText = labels.some((label) => typeof label === "string");
  const lookLikeNumbers = names.some((name) => NUMBER.test(name));

  const classNumbers = (numbers) => {
    if (!numbered && names.length === 2 && TRUE.includes(lower(names[0])) && FALSE.includes(lower(names[1])))
      throw refuse("has whole numbers, but the classes for true and false have the indices 0 and 1, in this order");
    const beyond = numbers.find((number) => names.length && number >= names.length && number !== ignored);
    if (beyond !== undefined) throw refuse(`has the class index ${beyond}`);
    return numbers;
  };
  const truth = (value) => {
    const alike = names.flatMap((name, i) => ((value ? TRUE : FALSE).includes(lower(name)) ? [i] : []));
    if (alike.length !== 1) throw refuse(`has the boolean ${value}, which matches no class`);
    return alike[0];
  };
  const number = (value) => {
    if (value === ignored) return ignored;
    const equal = names.filter((name) => NUMBER.test(name) && Number(name) === value);
    if (equal.length > 1) throw refuse(`has the number ${value}, which may be the classes ${listed(equal)}`);
    if (!equal.length || ![`${value}`, `${value}.0`].includes(equal[0])) throw refuse(`has the new class '${value}'`);
    return places.get(equal[0]);
  };
  const text = (value) => {
    if (places.has(value)) return places.get(value);
    if (ignored !== null && value === `${ignored}`) return ignored;
    const alike = isTruth(value) ? names.filter((name) => lower(name) === lower(value)) : [];
    const found = alike.length === 1 ? places.get(alike[0]) : isTruth(value) ? undefined : places.get(whole(value));
    if (found === undefined) throw refuse(`has the new class '${value}'`);
    return found;
  };

  if (areBooleans) return labels.map(names.length ? truth : Number);
  if (!hasText) {
    const numbers = labels.map(Number);
    const areNames = names.length && !numbered && lookLikeNumbers && numbers.every(Number.isFinite);
    return areNames ? numbers.map(number) : classNumbers(numbers);
  }
  const texts = labels.map(String);
  if (texts.every((label) => whole(label) !== undefined) && (!names.length || numbered || !lookLikeNumbers)) {
    const twofold = texts.filter((label) => places.has(label) && places.get(label) !== Number(whole(label)));
    if (twofold.length) throw refuse(`has ${listed(twofold)}, which may be a name or an index`);
    return classNumbers(texts.map((label) => Number(whole(label))));
  }
  if (!names.length && texts.every(isTruth)) return texts.map((label) => Number(lower(label) === "true"));
  return texts.map(text);
}

/** Convert labels of a target to class indices; return any other value unchanged. */
export function asNumbers(manifest, spec, value) {
  const classes = classesOf(manifest, spec.name);
  const isTarget = (manifest.targets ?? []).some((target) => target.name === spec.name);
  if (!isTarget || (spec.ignore_index == null && !classes)) return value;
  const isPlain = Array.isArray(value) || ArrayBuffer.isView(value);
  const data = isPlain ? value : value?.location === "gpu-buffer" ? null : value?.data;
  const flat = ArrayBuffer.isView(data) ? Array.from(data) : data;
  if (!Array.isArray(flat) || flat.some(Array.isArray)) return value;
  if (!isPlain && (value.dims ?? []).slice(1).some((size) => size !== 1)) return value; // labels of pixels or tokens
  if (spec.shape.slice(1).some((size) => size !== 1)) return value;
  if (!classes && flat.every((label) => typeof label === "number" || typeof label === "bigint")) return value;
  const numbers = numbersOf(spec, classes, flat.map((label) => (typeof label === "bigint" ? Number(label) : label)));
  return value.dims ? { data: numbers, dims: value.dims } : numbers;
}
