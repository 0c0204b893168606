// Uses the training page as a user would, in headless Chromium:
//
//     node page.mjs ADDRESS PACKAGES FOLDER SCENARIO
//
// Prints observations as one JSON object. Files that the page saves, and screenshots, are written to FOLDER.

import { join } from "node:path";
import { launch } from "../runtimes/chromium.mjs";

const [address, packages, folder, scenario] = process.argv.slice(2);
const READY = 150_000; // ms for the page to start

/** The digit 7 as a stroke: points between 0 and 1, relative to the drawing area. */
const SEVEN = [
  [0.3, 0.2],
  [0.7, 0.2],
  [0.45, 0.85],
];

async function open(context, { path = "/", size } = {}) {
  const page = await context.newPage();
  const errors = [];
  page.on("pageerror", (error) => errors.push(String(error)));
  page.on("console", (message) => message.type() === "error" && errors.push(message.text()));
  if (size) await page.setViewportSize(size);
  await page.goto(address + path);
  await ready(page);
  return { page, errors };
}

const ready = (page) =>
  page.waitForFunction(() => !document.getElementById("start").disabled, null, { timeout: READY });
const text = (page, id) => page.textContent(`#${id}`);
const accuracy = async (page) => parseFloat(await text(page, "accuracy")) / 100;
const guess = async (page) => /a (\d)/.exec(await text(page, "guess"))?.[1] ?? null;

async function draw(page, points) {
  const box = await page.locator("#canvas").boundingBox();
  const at = ([x, y]) => [box.x + x * box.width, box.y + y * box.height];
  await page.mouse.move(...at(points[0]));
  await page.mouse.down();
  for (const point of points.slice(1)) await page.mouse.move(...at(point), { steps: 8 });
  await page.mouse.up();
}

const trainedTo = (page, share) =>
  page.waitForFunction((s) => parseFloat(document.getElementById("accuracy").textContent) > 100 * s, share, {
    timeout: 120_000,
  });

async function save(page, button) {
  const [download] = await Promise.all([page.waitForEvent("download"), page.click(`#${button}`)]);
  const path = join(folder, download.suggestedFilename());
  await download.saveAs(path);
  return path;
}

const SCENARIOS = {
  async people(context) {
    const { page, errors } = await open(context);
    const isolated = await page.evaluate(() => crossOriginIsolated);
    const before = await accuracy(page);
    await draw(page, SEVEN);
    const firstGuess = await guess(page);
    await page.click("#labels button:nth-child(8)");
    const own = await text(page, "own-count");
    await page.click("#start");
    await trainedTo(page, 0.95);
    await draw(page, SEVEN);
    await page.click("#start");
    await page.waitForFunction(() => document.getElementById("start").textContent === "Go on");
    await page.waitForTimeout(300);
    const [stopped, after, lastGuess] = [Number(await text(page, "steps")), await accuracy(page), await guess(page)];
    await page.waitForTimeout(500);
    const still = Number(await text(page, "steps")) === stopped;
    await page.screenshot({ path: join(folder, "web.png"), fullPage: true });
    const [model, checkpoint] = [await save(page, "save"), await save(page, "checkpoint")];
    const chart = await page.getAttribute("#loss-chart", "aria-label");
    await page.click("#start"); // go on
    await page.waitForFunction((n) => Number(document.getElementById("steps").textContent) > n, stopped);
    await page.click("#reset");
    await page.waitForFunction(() => document.getElementById("message").textContent.includes("knows nothing"));
    const anew = await accuracy(page);
    await page.setInputFiles("#open", model);
    await page.waitForFunction(() => document.getElementById("message").textContent.startsWith("Loaded trained.onnx"));
    const loaded = await accuracy(page);
    await page.setInputFiles("#open", checkpoint);
    await page.waitForFunction(() => document.getElementById("message").textContent.startsWith("Loaded digits.ckpt"));
    const [restored, restoredSteps] = [await accuracy(page), Number(await text(page, "steps"))];
    await page.setInputFiles("#open", { name: "notes.onnx", mimeType: "text/plain", buffer: Buffer.from("no model") });
    await page.waitForFunction(() => document.getElementById("message").className.includes("wrong"));
    const refusal = await text(page, "message");
    const drawn = await page.evaluate(async () => {
      const { asPixels } = await import("./drawing.js");
      return Array.from(
        asPixels([
          [
            [0.3, 0.2],
            [0.7, 0.2],
            [0.45, 0.85],
          ],
        ]),
      );
    });
    return {
      before,
      after,
      own,
      firstGuess,
      lastGuess,
      stopped,
      still,
      anew,
      loaded,
      restored,
      restoredSteps,
      refusal,
      isolated,
      chart,
      model,
      checkpoint,
      drawn,
      errors,
      device: await text(page, "device"),
    };
  },

  async offline(context) {
    const { page, errors } = await open(context);
    const said = await text(page, "offline");
    await context.setOffline(true);
    await page.reload();
    await ready(page);
    await page.click("#start");
    await trainedTo(page, 0.8);
    const [far, network] = [
      await accuracy(page),
      await page.evaluate(() =>
        fetch("/never-asked-for").then(
          () => "there",
          () => "none",
        ),
      ),
    ];
    return { said, far, network, errors };
  },

  async keyboard(context) {
    const { page, errors } = await open(context);
    const focused = () => page.evaluate(() => document.activeElement.id || document.activeElement.textContent.trim());
    const press = async (...keys) => {
      for (const key of keys) await page.keyboard.press(key);
    };
    const to = async (id) => {
      for (let i = 0; i < 60 && (await focused()) !== id; i++) await press("Tab");
      return focused();
    };
    await press("Tab");
    const first = await focused();
    await to("start");
    const outline = await page.evaluate(() => getComputedStyle(document.activeElement).outlineStyle);
    await press("Enter");
    await trainedTo(page, 0.9);
    await press("Enter");
    await page.waitForFunction(() => document.getElementById("start").textContent === "Go on");
    await to("rate");
    await press("ArrowRight");
    const rate = await text(page, "rate-value");
    const canvas = await to("canvas");
    await press(...Array(4).fill("ArrowUp"), "Space", ...Array(9).fill("ArrowDown"), "Space");
    await page.waitForTimeout(200);
    const [pen, seen] = [await text(page, "pen"), await guess(page)];
    await press("1");
    const own = await text(page, "own-count");
    const names = await page.evaluate(
      () =>
        [...document.querySelectorAll("button, input, select, canvas[tabindex]")].filter(
          (e) => !(e.getAttribute("aria-label") || e.labels?.length || e.textContent.trim()),
        ).length,
    );
    return { first, outline, rate, canvas, pen, seen, own, unnamed: names, errors };
  },

  async phone(context) {
    const { page, errors } = await open(context, { size: { width: 375, height: 800 } });
    await page.click("#start");
    await trainedTo(page, 0.8);
    await page.click("#start");
    const wide = await page.evaluate(() => [document.documentElement.scrollWidth, innerWidth]);
    const small = await page.evaluate(() =>
      [...document.querySelectorAll("button, select, input")]
        .filter((e) => e.getBoundingClientRect().height < 34)
        .map((e) => e.id),
    );
    await page.screenshot({ path: join(folder, "phone.png"), fullPage: true });
    return { wide, small, errors };
  },

  async docs(context) {
    const page = await context.newPage();
    const errors = [];
    page.on("pageerror", (error) => errors.push(String(error)));
    await page.goto(address);
    await page.waitForFunction(() => globalThis.trained, null, { timeout: READY });
    return { errors, ...(await page.evaluate(() => globalThis.trained)) };
  },

  async webgpu(context) {
    const { page, errors } = await open(context, { path: "/?provider=webgpu" });
    const before = await accuracy(page);
    await page.click("#start");
    await trainedTo(page, 0.6); // a software renderer is slow
    await page.click("#start");
    await page.waitForFunction(() => document.getElementById("start").textContent === "Go on");
    const [device, steps, reached] = [
      await text(page, "device"),
      Number(await text(page, "steps")),
      await accuracy(page),
    ];
    await page.selectOption("#provider", "wasm"); // the training state is kept
    await page.waitForFunction(() => document.getElementById("device").textContent.includes("WebAssembly"));
    await page.click("#start");
    await page.waitForFunction((n) => Number(document.getElementById("steps").textContent) > n, steps);
    await page.click("#start");
    return { before, device, reached, after: await accuracy(page), message: await text(page, "message"), errors };
  },
};

const browser = await launch(packages, { webgpu: scenario === "webgpu" });
const settings = { acceptDownloads: true, reducedMotion: "reduce", viewport: { width: 1280, height: 900 } };
const context = await browser.newContext(settings);
try {
  console.log(JSON.stringify(await SCENARIOS[scenario](context)));
} catch (error) {
  for (const page of context.pages()) console.error(`the page says: ${await text(page, "message")}`);
  throw error;
} finally {
  await browser.close();
}
