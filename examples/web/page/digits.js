// The training data: scikit-learn's handwritten digits, and digits that the user has drawn and labelled.

import { SIDE } from "./drawing.js";

const PIXELS = SIDE * SIDE;
const OWN = 8; // the largest number of the user's drawings in a batch with sample digits
export const BATCH = 32;

/**
 * Load the sample digits as {train, unseen}, two lists of {pixels, digit}; `unseen` is the number of held-out digits.
 * The file has all digits, then all pixels, from 0 to 16.
 */
export async function sampleDigits(url, unseen) {
  const response = await fetch(url);
  if (!response.ok) throw new Error(`cannot load ${url} (${response.status})`);
  const bytes = new Uint8Array(await response.arrayBuffer());
  const count = bytes.length / (PIXELS + 1);
  const images = Array.from({ length: count }, (_, i) => ({
    digit: bytes[i],
    pixels: Float32Array.from(bytes.subarray(count + i * PIXELS, count + (i + 1) * PIXELS), (value) => value / 16),
  }));
  return { train: images.slice(unseen), unseen: images.slice(0, unseen) };
}

/** Convert images to a batch for the network. */
export function asBatch(images) {
  const x = new Float32Array(images.length * PIXELS);
  images.forEach(({ pixels }, i) => x.set(pixels, i * PIXELS));
  return { x, target: images.map(({ digit }) => digit) };
}

/** An endless source of batches: sample digits in a new order each epoch, mixed with the user's drawings. */
export class Batches {
  epoch = 0;
  #order = [];

  constructor(samples) {
    this.samples = samples;
    this.own = [];
  }

  next(alone) {
    const drawn = alone ? BATCH : Math.min(OWN, 2 * this.own.length);
    const images = Array.from({ length: drawn }, () => this.own[Math.floor(Math.random() * this.own.length)]);
    while (images.length < BATCH) images.push(this.#sample());
    return asBatch(images);
  }

  #sample() {
    if (!this.#order.length) {
      this.epoch += 1;
      this.#order = shuffled(this.samples);
    }
    return this.#order.pop();
  }
}

function shuffled(values) {
  const order = [...values];
  for (let i = order.length - 1; i > 0; i--) {
    const j = Math.floor(Math.random() * (i + 1));
    [order[i], order[j]] = [order[j], order[i]];
  }
  return order;
}
