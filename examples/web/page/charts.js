// Curves and small images.

import { SIDE } from "./drawing.js";

const [WIDTH, HEIGHT, LEFT, BOTTOM, TOP, MOST] = [320, 150, 42, 20, 8, 240];
const element = (name, attributes, text = "") => {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  Object.entries(attributes).forEach(([key, value]) => made.setAttribute(key, value));
  made.textContent = text;
  return made;
};

/** A curve in an <svg>. Of many points, neighbours are merged, so that it keeps at most MOST. */
export class Chart {
  #points = [];
  #stride = 1;
  #waiting = [];

  constructor(svg, { say, top, format }) {
    Object.assign(this, { svg, say, top, format });
    this.paint();
  }

  clear() {
    [this.#points, this.#stride, this.#waiting] = [[], 1, []];
    this.paint();
  }

  add(x, y) {
    this.#waiting.push([x, y]);
    if (this.#waiting.length < this.#stride) return;
    this.#points.push(merged(this.#waiting));
    this.#waiting = [];
    if (this.#points.length <= MOST) return;
    this.#stride *= 2;
    this.#points = this.#points.flatMap((p, i, all) => (i % 2 ? [merged([all[i - 1], p])] : []));
  }

  paint() {
    const points = this.#waiting.length ? [...this.#points, merged(this.#waiting)] : this.#points;
    const last = points.at(-1);
    const highest = this.top ?? Math.max(0.1, ...points.map((p) => p[1]));
    const end = Math.max(1, last?.[0] ?? 1);
    const x = (value) => LEFT + (value / end) * (WIDTH - LEFT - 8);
    const y = (value) => HEIGHT - BOTTOM - (value / highest) * (HEIGHT - BOTTOM - TOP);
    const marks = [0, 0.5, 1].map((share) => share * highest);
    this.svg.replaceChildren(
      ...marks.map((m) => element("line", { class: "grid", x1: LEFT, x2: WIDTH - 8, y1: y(m), y2: y(m) })),
      ...marks.map((m) => element("text", { x: LEFT - 5, y: y(m) + 4, "text-anchor": "end" }, this.format(m))),
      element("text", { x: LEFT, y: HEIGHT - 5 }, "0"),
      element("text", { x: WIDTH - 8, y: HEIGHT - 5, "text-anchor": "end" }, last ? `${last[0]} steps` : ""),
      element("polyline", { class: "curve", points: points.map((p) => `${x(p[0])},${y(p[1])}`).join(" ") }),
    );
    this.svg.setAttribute(
      "aria-label",
      last ? `${this.say}: ${this.format(last[1])} after ${last[0]} steps` : `${this.say}: nothing yet`,
    );
  }
}

/** Merge points into one, with the x of the last and the mean of y. */
const merged = (points) => [points.at(-1)[0], points.reduce((sum, p) => sum + p[1], 0) / points.length];

/** Return a small canvas with an image of 8 x 8 pixels. */
export function picture(pixels) {
  const canvas = Object.assign(document.createElement("canvas"), { width: SIDE, height: SIDE });
  canvas.setAttribute("aria-hidden", "true");
  const image = new ImageData(SIDE, SIDE);
  pixels.forEach((value, i) => image.data.set([255 * (1 - value), 255 * (1 - value), 255 * (1 - value), 255], 4 * i));
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
}
