// Uses the page that fine-tunes a language model as a user would, in headless Chromium:
//
//     node teach.mjs ADDRESS PACKAGES FOLDER SCENARIO
//
// Prints observations as one JSON object. Files that the page saves, and screenshots, are written to FOLDER. The
// scenario "folder" picks the folders llm and half in it.

import { join } from "node:path";
import { launch } from "../runtimes/chromium.mjs";

const [address, packages, folder, scenario] = process.argv.slice(2);
const LONG = 120_000; // ms for the slowest actions

const text = (page, id) => page.textContent(`#${id}`);
const ready = (page) =>
  page.waitForFunction(() => !document.getElementById("start").disabled, null, { timeout: LONG });
const says = (page, words) =>
  page.waitForFunction((w) => document.getElementById("message").textContent.includes(w), words, { timeout: LONG });

async function open(context, size) {
  const page = await context.newPage();
  const errors = [];
  page.on("pageerror", (error) => errors.push(String(error)));
  page.on("console", (message) => message.type() === "error" && errors.push(message.text()));
  if (size) await page.setViewportSize(size);
  await page.goto(`${address}/teach/`);
  await ready(page);
  return { page, errors };
}

async function trainTo(page, steps) {
  await page.click("#start");
  const reached = (n) => Number(document.getElementById("steps").textContent) >= n;
  await page.waitForFunction(reached, steps, { timeout: LONG });
  await page.click("#start");
  await says(page, "Stopped after");
  await page.waitForFunction(() => document.getElementById("start").textContent === "Go on");
}

async function save(page, button, count = 1) {
  const downloads = [];
  const all = new Promise((done) =>
    page.on("download", (download) => {
      downloads.push(download);
      if (downloads.length === count) done();
    }),
  );
  await page.click(`#${button}`);
  await all;
  page.removeAllListeners("download");
  const paths = downloads.map((download) => join(folder, download.suggestedFilename()));
  for (const [i, download] of downloads.entries()) await download.saveAs(paths[i]);
  return paths;
}

async function ask(page, question) {
  await page.fill("#question", question);
  await page.click("#ask");
  await page.waitForFunction(() => !document.getElementById("ask").disabled, null, { timeout: LONG });
  return text(page, "answer");
}

const SCENARIOS = {
  async people(context) {
    const { page, errors } = await open(context);
    const [examples, counted] = [await page.inputValue("#examples"), await text(page, "counted")];
    const marked = await page.locator("#preview mark").allTextContents();
    await trainTo(page, 120);
    const steps = Number(await text(page, "steps"));
    const answer = await ask(page, "Say hello.");
    const samples = await page.locator("#samples li .said").allTextContents();
    const chart = await page.getAttribute("#loss-chart", "aria-label");
    const [memory, kept] = [await text(page, "memory"), await text(page, "stored")];
    const files = [
      ...(await save(page, "losses")),
      ...(await save(page, "peft", 2)),
      ...(await save(page, "onnx-adapter")),
    ];
    await page.screenshot({ path: join(folder, "teach.png"), fullPage: true });
    const asked = [];
    page.on("request", (request) => asked.push(request.url()));
    await page.reload();
    await ready(page);
    const again = { message: await text(page, "message"), answer: await ask(page, "Say hello.") };
    await page.click("#reset");
    await says(page, "as it was");
    const anew = { steps: await text(page, "steps"), answer: await ask(page, "Say hello.") };
    const loaded = [];
    for (const chosen of [files.slice(1, 3), files.slice(3)]) {
      await page.click("#reset");
      await page.setInputFiles("#open", chosen);
      await says(page, "Loaded ");
      loaded.push(await ask(page, "Say hello."));
    }
    await page.setInputFiles("#open", { name: "a.onnx_adapter", mimeType: "text/plain", buffer: Buffer.from("none") });
    await page.waitForFunction(() => document.getElementById("message").className.includes("wrong"));
    const refusal = await text(page, "message");
    await page.fill("#examples", '{"prompt": "a"}');
    await page.click("#question");
    const wrong = await text(page, "counted");
    const fetched = asked.filter((url) => url.includes("/teach/model/"));
    return { examples, counted, marked, steps, answer, samples, chart, memory, kept, files, again, anew, loaded, refusal,
      wrong, fetched, errors }; // prettier-ignore
  },

  async folder(context) {
    const { page, errors } = await open(context);
    await page.setInputFiles("#folder", join(folder, "llm"));
    await page.waitForFunction(() => document.getElementById("model").textContent.includes("folder"), null, {
      timeout: LONG,
    });
    await says(page, "Ready.");
    const model = await text(page, "model");
    const examples = (await page.inputValue("#examples")).replaceAll("Who are you?", "Who is there?");
    await page.fill("#examples", examples);
    await page.click("#question");
    const before = await ask(page, "Say hello.");
    await trainTo(page, 12);
    const [losses] = await save(page, "losses");
    await save(page, "peft", 2);
    const [device, answer] = [await text(page, "device"), await ask(page, "Say hello.")];
    await page.reload();
    await ready(page);
    const again = await text(page, "model");
    const kept = (await page.inputValue("#examples")) === examples;
    await page.setInputFiles("#folder", join(folder, "half"));
    await page.waitForFunction(() => document.getElementById("message").className.includes("wrong"));
    const refusal = await text(page, "message");
    await page.click("#tiny");
    await page.waitForFunction(() => document.getElementById("model").textContent.includes("tiny"), null, {
      timeout: LONG,
    });
    return { model, examples, losses, device, before, answer, again, kept, refusal, errors };
  },

  async phone(context) {
    const { page, errors } = await open(context, { width: 375, height: 800 });
    await trainTo(page, 4);
    const wide = await page.evaluate(() => [document.documentElement.scrollWidth, innerWidth]);
    const small = await page.evaluate(() =>
      [...document.querySelectorAll("button, input:not(.hidden), textarea, .button")]
        .filter((e) => e.getBoundingClientRect().height < 34)
        .map((e) => e.id || e.className),
    );
    const unnamed = await page.evaluate(
      () =>
        [...document.querySelectorAll("button, input, textarea")].filter(
          (e) => !(e.getAttribute("aria-label") || e.labels?.length || e.textContent.trim()),
        ).length,
    );
    await page.screenshot({ path: join(folder, "teach-phone.png"), fullPage: true });
    return { wide, small, unnamed, errors };
  },
};

const browser = await launch(packages);
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
