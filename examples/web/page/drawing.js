// A canvas to draw on with mouse, pen, finger or keyboard, and its conversion to an image of 8 x 8 pixels.

export const SIDE = 8;
const FINE = 32; // the side of a bitmap: pixels of sample digits are counts of black pixels in its blocks of 4 x 4
const THICK = 4.2; // the width of strokes in pixels of that bitmap
const STEP = 1 / 14; // how far an arrow key moves the pen, relative to the canvas

/** Return strokes as pixels from 0 to 1, row by row. A stroke is a list of points [x, y] between 0 and 1. */
export function asPixels(strokes) {
  const pixels = new Float32Array(SIDE * SIDE);
  const points = strokes.flat();
  if (!points.length) return pixels;
  const [xs, ys] = [points.map((p) => p[0]), points.map((p) => p[1])];
  const middle = (values) => (Math.min(...values) + Math.max(...values)) / 2;
  const extent = Math.max(Math.max(...xs) - Math.min(...xs), Math.max(...ys) - Math.min(...ys), 0.05);
  const scale = (FINE - THICK) / extent;
  const canvas = new OffscreenCanvas(FINE, FINE);
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.translate(FINE / 2 - scale * middle(xs), FINE / 2 - scale * middle(ys));
  trace(context, strokes, scale, THICK);
  const { data } = context.getImageData(0, 0, FINE, FINE);
  const block = FINE / SIDE;
  for (let i = 0; i < FINE * FINE; i++)
    if (data[4 * i + 3] > 127)
      pixels[Math.floor(i / FINE / block) * SIDE + Math.floor((i % FINE) / block)] += 1 / (block * block);
  return pixels;
}

function trace(context, strokes, scale, width) {
  Object.assign(context, { lineWidth: width, lineCap: "round", lineJoin: "round" });
  for (const [first, ...rest] of strokes) {
    context.beginPath();
    context.moveTo(scale * first[0], scale * first[1]);
    for (const [x, y] of rest.length ? rest : [first]) context.lineTo(scale * x, scale * y);
    context.stroke();
  }
}

export class Drawing {
  strokes = [];
  #pen = [0.5, 0.5];
  #down = false; // whether the pen that the keyboard moves is down
  #pointer = null;

  constructor(canvas, { changed, labelled, say }) {
    Object.assign(this, { canvas, changed, say });
    canvas.addEventListener("pointerdown", (event) => {
      this.#pointer = event.pointerId;
      canvas.setPointerCapture(event.pointerId);
      this.#begin(this.#at(event));
    });
    canvas.addEventListener("pointermove", (event) => {
      if (event.pointerId === this.#pointer) this.#go(this.#at(event));
    });
    for (const end of ["pointerup", "pointercancel"]) canvas.addEventListener(end, () => (this.#pointer = null));
    canvas.addEventListener("keydown", (event) => this.#key(event, labelled));
    for (const seen of ["focus", "blur"]) canvas.addEventListener(seen, () => this.paint());
    this.paint();
  }

  clear() {
    [this.strokes, this.#down] = [[], false];
    this.#show();
  }

  /** Replace the drawing by an image, in which every dark pixel becomes a point. */
  copy(pixels) {
    const place = (i) => (i + 0.5) / SIDE;
    const rows = [...pixels.keys()].filter((i) => pixels[i] > 0.4);
    this.strokes = rows.map((i) => [[place(i % SIDE), place(Math.floor(i / SIDE))]]);
    this.#show();
  }

  paint() {
    const { canvas } = this;
    const context = canvas.getContext("2d");
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.clearRect(0, 0, canvas.width, canvas.height);
    context.strokeStyle = "#d9e2ea";
    context.lineWidth = 1;
    for (let i = 1; i < SIDE; i++) {
      const at = (i * canvas.width) / SIDE;
      context.strokeRect(at, -1, 0, canvas.height + 2);
      context.strokeRect(-1, at, canvas.width + 2, 0);
    }
    context.strokeStyle = "#15202b";
    trace(context, this.strokes, canvas.width, canvas.width * 0.075);
    if (document.activeElement === canvas && this.#pointer === null) {
      context.strokeStyle = this.#down ? "#a3211b" : "#0b6bb8";
      context.lineWidth = 4;
      context.beginPath();
      context.arc(this.#pen[0] * canvas.width, this.#pen[1] * canvas.height, 16, 0, 7);
      context.stroke();
    }
  }

  #at(event) {
    const box = this.canvas.getBoundingClientRect();
    return [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height];
  }

  #begin(point) {
    this.#pen = point;
    this.strokes.push([point]);
    this.#show();
  }

  #go(point) {
    this.#pen = point;
    this.strokes.at(-1).push(point);
    this.#show();
  }

  #show() {
    this.paint();
    this.changed();
  }

  #key(event, labelled) {
    const move = { ArrowLeft: [-STEP, 0], ArrowRight: [STEP, 0], ArrowUp: [0, -STEP], ArrowDown: [0, STEP] }[event.key];
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (move) {
      const point = this.#pen.map((value, i) => Math.min(0.94, Math.max(0.06, value + move[i])));
      if (this.#down) this.#go(point);
      else this.#pen = point;
      this.paint();
    } else if (event.key === " ") {
      this.#down = !this.#down;
      if (this.#down) this.#begin(this.#pen);
      this.say(this.#down ? "Pen down" : "Pen up");
      this.paint();
    } else if (event.key === "Delete" || event.key === "Backspace") {
      this.clear();
      this.say("Cleared");
    } else if (/^[0-9]$/.test(event.key)) labelled(Number(event.key));
    else return;
    event.preventDefault();
  }
}
