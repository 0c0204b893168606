"use strict";
// Rows are the modules, nodes and weights of the model, in its order; a row has a cell for each part of the step. As this
// order is the layout, no layout is computed, and a step with thousands of nodes opens at once.
const data = JSON.parse(document.getElementById("data").textContent);
const FORWARD = 0, LOSS = 1, BACKWARD = 2, UPDATE = 3;
const LANES = ["forward", "backward", "update"], TITLES = ["forward and loss", "backward", "update"], WIDTHS = [3, 4, 2.6];
const SHOWN_AT_ONCE = 6, FIRST_ROWS = 36;
const byId = (id) => document.getElementById(id);
const lane = (node) => [0, 0, 1, 2][node.p];
const KINDS = ["activations", "gradients", "update"];

function make(tag, options = {}, ...children) {
  const { text, on = {}, ...attributes } = options;
  const element = tag === "svg" || make.svg.has(tag)
    ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) if (value !== undefined) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  for (const [name, call] of Object.entries(on)) element.addEventListener(name, call);
  element.append(...children);
  return element;
}
make.svg = new Set(["svg", "path", "line", "title"]);

const bytes = (n) => {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let i = 0;
  while (n >= 1024 && i < 4) { n /= 1024; i++; }
  return `${i ? n.toFixed(1) : n} ${units[i]}`;
};
const time = (s) => (s >= 1 ? `${s.toFixed(2)} s` : s >= 1e-3 ? `${(s * 1e3).toFixed(2)} ms` : `${(s * 1e6).toFixed(0)} µs`);
/**
 * Format seconds as a share of the time of all nodes. Timing each node alone makes a small step look longer than it is,
 * so seconds would not add up to the time of the step.
 */
const share = (seconds) => { const part = (100 * seconds) / state.timed; return part < 0.1 ? "< 0.1 %" : `${part.toFixed(part < 10 ? 1 : 0)} %`; };
const sum = (of) => Object.values(of).reduce((a, b) => a + b, 0);
const operator = (node) => (node.d && node.d !== "gradgraph" ? `${node.d}.${node.o}` : node.o);
const part = (node) => data.parts[node.p];

// --- the graph as rows ---------------------------------------------------------------------------------------

class Row {
  constructor(name, parent, kind) {
    Object.assign(this, { name, parent, kind, children: new Map(), cells: [[], [], []], open: false, made: 0, seconds: 0 });
    this.label = name;
    this.path = parent && parent.path ? `${parent.path}.${name}` : name;
  }
  child(name, kind) {
    const key = `${kind} ${name}`;
    if (!this.children.has(key)) this.children.set(key, new Row(name, this, kind));
    return this.children.get(key);
  }
  get nodes() { return this.cells.flat(); }
}

function rowsOf(graph) {
  const root = new Row("", null, "module");
  const module = (path) => (path ? path.split(".").reduce((row, name) => row.child(name, "module"), root) : root);
  const place = (node) => {
    if (node.p === UPDATE) return node.w ? module(node.m).child(node.w, "weight") : root.child("for all weights", "optimizer");
    const name = node.r || (node.p === BACKWARD ? "" : node.n);
    if (!name) return root.child("gradients of several nodes", "optimizer"); // shown last, as the optimizer's nodes
    if (name.startsWith("loss/") && !node.m) return root.child("loss", "loss").child(name, "node");
    return module(node.m).child(name, "node");
  };
  graph.nodes.forEach((node, i) => {
    node.index = i;
    node.row = place(node);
    for (let row = node.row; row; row = row.parent) row.cells[lane(node)].push(node);
  });
  for (const [i, made] of graph.moments) {
    if (i < 0) continue;
    const node = graph.nodes[i];
    node.made = (node.made || 0) + made;
    for (let row = node.row; row; row = row.parent) row.made += made;
  }
  for (const [i, seconds] of Object.entries(graph.times ? graph.times.nodes : {})) {
    if (i < 0) continue;
    graph.nodes[i].seconds = seconds;
    for (let row = graph.nodes[i].row; row; row = row.parent) row.seconds += seconds;
  }
  settle(root);
  // the loss, and after it the optimizer's nodes for all weights, come last
  for (const kind of ["loss", "optimizer"]) {
    for (const [key, row] of [...root.children]) if (row.kind === kind) { root.children.delete(key); root.children.set(key, row); }
  }
  return root;
}

/** Merge a module with its only child if that is a module or a single node; drop the names of outer rows from labels. */
function settle(root) {
  const stack = [root];
  while (stack.length) {
    const row = stack.pop();
    for (const [key, child] of row.children) {
      let only = child;
      while (only.kind === "module" && only.children.size === 1 && [...only.children.values()][0].kind === "module") {
        const inner = [...only.children.values()][0];
        inner.label = `${only.label}.${inner.label}`;
        only = inner;
      }
      if (only !== child) { only.parent = row; row.children.set(key, only); }
      if (only.kind === "module") gather(only);
      if (only.kind === "node") only.label = only.name.split("/").pop() || only.name;
      if (only.kind === "weight") only.label = only.name.split(".").pop();
      stack.push(only);
    }
  }
}

/** Make a module of one node and its weights a single row. */
function gather(row) {
  const kinds = [...row.children.values()].map((child) => child.kind);
  if (kinds.includes("module") || kinds.filter((kind) => kind === "node").length > 1) return;
  row.children.clear();
  for (const node of row.nodes) node.row = row;
}

const canOpen = (row) => row.children.size > 0 || row.cells.some((nodes) => nodes.length > SHOWN_AT_ONCE);

function openFirst(root) {
  root.open = true;
  let count = root.children.size, level = [...root.children.values()];
  while (level.length) {
    const next = level.filter((row) => row.kind === "module" && row.children.size).sort((a, b) => a.children.size - b.children.size);
    const opened = [];
    for (const row of next) if (count + row.children.size <= FIRST_ROWS) { row.open = true; count += row.children.size; opened.push(row); }
    level = opened.flatMap((row) => [...row.children.values()]);
  }
}

function visible(root) {
  const found = [], stack = [...root.children.values()].reverse().map((row) => [row, 1]);
  while (stack.length) {
    const [row, level] = stack.pop();
    found.push([row, level]);
    if (row.open) for (const child of [...row.children.values()].reverse()) stack.push([child, level + 1]);
  }
  return found;
}

// --- what is shown -------------------------------------------------------------------------------------------

const state = { graph: null, root: null, chosen: null, words: null, matches: [], found: -1, focus: 0, rows: [], chips: new Map(), over: null };

function show(index) {
  const graph = data.graphs[index];
  state.graph = graph;
  state.makers = new Map();
  graph.nodes.forEach((node) => (node.u || []).forEach((name) => state.makers.set(name, node)));
  state.readers = new Map();
  graph.nodes.forEach((node) => (node.i || []).forEach((name) => {
    if (!state.readers.has(name)) state.readers.set(name, []);
    state.readers.get(name).push(node);
  }));
  state.byName = new Map(graph.nodes.map((node) => [node.n, node]));
  state.gradients = new Map();
  graph.nodes.forEach((node) => {
    for (const name of new Set([node.f, node.p === BACKWARD ? node.r : ""])) {
      if (!name) continue;
      if (!state.gradients.has(name)) state.gradients.set(name, []);
      state.gradients.get(name).push(node);
    }
  });
  state.root = graph.root = graph.root || rowsOf(graph);
  state.lanes = LANES.map((_, i) => i).filter((i) => i === 0 || state.root.cells[i].length);
  state.numbers = [...(graph.moments.length ? ["makes"] : []), ...(graph.times ? ["time"] : [])];
  state.timed = graph.times ? sum(graph.times.places) : 0;
  byId("rows").style.setProperty("--lanes", state.lanes.map((i) => `minmax(0, ${WIDTHS[i]}fr)`).join(" "));
  byId("rows").style.setProperty("--numbers", state.numbers.map(() => "4.5rem").join(" "));
  if (!state.root.open) openFirst(state.root);
  state.chosen = null;
  for (const [i, button] of [...byId("steps").children].entries()) button.setAttribute("aria-pressed", String(i === index));
  state.words = null;
  drawOver();
  draw();
  describe(null);
  search(byId("search").value);
}

function draw() {
  const box = byId("rows");
  state.rows = visible(state.root);
  state.focus = Math.min(state.focus, Math.max(state.rows.length - 1, 0));
  state.chips = new Map();
  state.nodeChips = [];
  const head = make("div", { role: "row", class: "row head" });
  for (const name of ["module", ...state.lanes.map((i) => TITLES[i]), ...state.numbers]) {
    head.append(make("span", { role: "columnheader", text: name, class: state.numbers.includes(name) ? "number" : "" }));
  }
  const lines = make("svg", { "aria-hidden": "true" });
  const drawn = state.rows.map(([row, level], i) => drawRow(row, level, i));
  box.setAttribute("aria-rowcount", String(drawn.length + 1));
  box.replaceChildren(lines, head, ...drawn);
  state.lines = lines;
  drawFlow();
  mark();
}

function drawRow(row, level, i) {
  const openable = canOpen(row);
  const name = make("span", { role: "rowheader", class: "name", style: `--level: ${level - 1}` });
  if (openable) {
    name.append(make("button", { type: "button", class: "twist", tabindex: "-1", "aria-hidden": "true", text: row.open ? "▾" : "▸",
      on: { click: () => toggle(row) } }));
  } else name.append(make("span", { class: "leaf" }));
  name.append(make("span", { text: row.label, title: row.name }));
  const element = make("div", { role: "row", class: `row${row.open ? " open" : ""}`, tabindex: i === state.focus ? "0" : "-1",
    "aria-level": level, "aria-expanded": openable ? String(row.open) : undefined, "aria-label": said(row),
    on: { focus: () => { state.focus = i; } } }, name);
  element.row = row;
  state.lanes.forEach((which) => element.append(drawCell(row, row.cells[which], which)));
  const numbers = { makes: row.made && bytes(row.made), time: row.seconds && share(row.seconds) };
  for (const name of state.numbers) element.append(make("span", { role: "gridcell", class: "number", text: numbers[name] || "" }));
  return element;
}

const said = (row) => `${row.name || row.label}: ` + LANES.map((name, i) => [name, row.cells[i].length])
  .filter(([, count]) => count).map(([name, count]) => `${count} ${name}`).join(", ");

function drawCell(row, nodes, which) {
  const cell = make("div", { role: "gridcell", class: "cell" });
  if (!nodes.length || (row.open && row.children.size)) return cell;
  const alone = row.children.size === 0 && (row.open || nodes.length <= SHOWN_AT_ONCE);
  for (const group of alone ? nodes.map((node) => [node]) : [nodes]) cell.append(chip(row, group, which, alone));
  return cell;
}

function chip(row, nodes, which, alone) {
  const kind = alone ? part(nodes[0]) : row.kind === "loss" && which === 0 ? "loss" : LANES[which];
  const element = make("button", { type: "button", tabindex: "-1", class: `chip ${kind}${alone ? "" : " many"}`,
    text: alone ? caption(nodes[0], row) : summary(nodes), title: alone ? nodes[0].n : `${nodes.length} nodes; open the row to see them`,
    on: { click: () => (alone ? choose(nodes[0]) : toggle(row)), mouseenter: () => relate(nodes), mouseleave: () => relate(null),
      focus: () => relate(nodes), blur: () => relate(null) } });
  element.nodes = nodes;
  for (const node of nodes) state.chips.set(node, element);
  state.nodeChips.push(element);
  return element;
}

const caption = (node, row) => (node.p === UPDATE && node.w && row.kind === "module" ? `${node.w.split(".").pop()}: ` : "") + operator(node);

function summary(nodes) {
  const counts = new Map();
  for (const node of nodes) counts.set(operator(node), (counts.get(operator(node)) || 0) + 1);
  const most = [...counts].sort((a, b) => b[1] - a[1]).slice(0, 3).map(([name, n]) => (n > 1 ? `${n} ${name}` : name));
  return `${nodes.length}: ${most.join(", ")}${counts.size > 3 ? ", …" : ""}`;
}

// --- edges ---------------------------------------------------------------------------------------------------

function spots() {
  const origin = byId("rows").getBoundingClientRect(), found = new Map();
  for (const element of state.nodeChips) {
    const r = element.getBoundingClientRect();
    found.set(element, { left: r.left - origin.left, right: r.right - origin.left, top: r.top - origin.top,
      bottom: r.bottom - origin.top, x: (r.left + Math.min(r.right, r.left + 60)) / 2 - origin.left, y: (r.top + r.bottom) / 2 - origin.top });
  }
  return found;
}

function curve(a, b) {
  if (Math.abs(a.y - b.y) < 4) {
    const [from, to] = a.left < b.left ? [a.right, b.left] : [a.left, b.right];
    return `M${from} ${a.y}L${to} ${b.y}`;
  }
  const down = a.y < b.y, y1 = down ? a.bottom : a.top, y2 = down ? b.top : b.bottom, apart = Math.abs(y2 - y1);
  if (Math.abs(a.left - b.left) > 150) { // between two parts of the step
    const right = a.left < b.left, x1 = right ? a.right : a.left, x2 = right ? b.left : b.right, middle = (x1 + x2) / 2;
    return `M${x1} ${a.y}C${middle} ${a.y} ${middle} ${b.y} ${x2} ${b.y}`;
  }
  if (apart < 45) return `M${a.x} ${y1}C${a.x} ${(y1 + y2) / 2} ${b.x} ${(y1 + y2) / 2} ${b.x} ${y2}`;
  const bend = Math.min(a.left, b.left) - Math.min(22, 4 + 3 * Math.log2(apart / 20));
  return `M${a.left} ${a.y}C${bend} ${a.y} ${bend} ${a.y} ${bend} ${a.y + (down ? 14 : -14)}L${bend} ${b.y - (down ? 14 : -14)}C${bend} ${b.y} ${bend} ${b.y} ${b.left} ${b.y}`;
}

/** Draw the edges within the forward and within the backward pass, between the visible chips. */
function drawFlow() {
  const at = spots(), seen = new Set(), parts = [];
  const ids = new Map(state.nodeChips.map((element, i) => [element, i]));
  for (const node of state.graph.nodes) {
    const to = state.chips.get(node);
    if (!to) continue;
    for (const name of node.i || []) {
      const maker = state.makers.get(name), from = maker && state.chips.get(maker);
      if (!from || from === to || lane(node) === 2 || lane(maker) !== lane(node)) continue;
      const key = ids.get(from) * state.nodeChips.length + ids.get(to);
      if (seen.has(key)) continue;
      seen.add(key);
      parts.push(curve(at.get(from), at.get(to)));
    }
  }
  const box = byId("rows");
  state.lines.setAttribute("width", box.clientWidth);
  state.lines.setAttribute("height", box.clientHeight);
  state.lines.replaceChildren(make("path", { class: "flow", d: parts.join("") }));
}

/** Return the nodes whose gradients these nodes compute, and the nodes that compute the gradients of these. */
function partners(nodes) {
  const found = new Set();
  for (const node of nodes) {
    for (const name of [node.f, node.p === BACKWARD ? node.r : ""]) if (name && state.byName.has(name)) found.add(state.byName.get(name));
    if (node.p === FORWARD || node.p === LOSS) {
      for (const other of state.gradients.get(node.n) || []) found.add(other);
      for (const other of node.row.cells[1]) if (!other.f || node.row.cells[0].length === 1 || other.f === node.n) found.add(other);
    }
  }
  nodes.forEach((node) => found.delete(node));
  return found;
}

function around(node) {
  const before = new Set((node.i || []).map((name) => state.makers.get(name)).filter(Boolean));
  const after = new Set((node.u || []).flatMap((name) => state.readers.get(name) || []));
  return [before, after];
}

function relate(nodes) {
  state.over = nodes;
  mark();
}

/** Highlight the selected node, its related nodes, and the results of the search. */
function mark() {
  const nodes = state.over || (state.chosen ? [state.chosen] : []), related = partners(nodes);
  const linked = new Set([...related, ...(state.over || [])].map((node) => state.chips.get(node)));
  const found = new Set(state.matches.map((node) => state.chips.get(node)));
  for (const element of state.nodeChips) {
    element.classList.toggle("linked", linked.has(element));
    element.classList.toggle("match", found.has(element));
    element.classList.toggle("chosen", state.chosen !== null && element.nodes.includes(state.chosen));
  }
  state.lines.querySelectorAll(".strong").forEach((path) => path.remove());
  if (nodes.length === 0 || nodes.length > 200) return;
  const at = spots(), drawn = { forward: new Set(), backward: new Set(), update: new Set(), loss: new Set() };
  const link = (a, b) => {
    const [from, to] = [state.chips.get(a), state.chips.get(b)];
    if (from && to && from !== to) drawn[part(b)].add(curve(at.get(from), at.get(to)));
  };
  for (const node of nodes) {
    const [before, after] = around(node);
    before.forEach((other) => link(other, node));
    after.forEach((other) => link(node, other));
  }
  for (const [kind, paths] of Object.entries(drawn)) {
    if (paths.size) state.lines.append(make("path", { class: `strong ${kind}`, d: [...paths].join("") }));
  }
}

// --- choosing ------------------------------------------------------------------------------------------------

function toggle(row, open = !row.open) {
  row.open = open;
  const i = state.rows.findIndex(([other]) => other === row);
  if (i >= 0) state.focus = i;
  draw();
  rowElements()[state.focus]?.focus();
}

const rowElements = () => [...byId("rows").querySelectorAll(".row:not(.head)")];

function reveal(node) {
  for (let row = node.row; row; row = row.parent) {
    if (row !== node.row || row.children.size || row.cells.some((nodes) => nodes.length > SHOWN_AT_ONCE)) row.open = true;
  }
}

function choose(node, scroll = false) {
  state.chosen = state.chosen === node && !scroll ? null : node;
  state.over = null;
  if (scroll) {
    reveal(node);
    draw();
    state.chips.get(node)?.scrollIntoView({ block: "center", inline: "nearest" });
  } else mark();
  describe(state.chosen);
  drawOver();
}

function describe(node) {
  const box = byId("details");
  if (!node) {
    box.replaceChildren(make("h2", { text: "Nothing is selected" }),
      make("p", { text: "Select a node: lines lead to what it reads and to what reads it." + (state.gradients.size ? " Its gradient, or what it is the gradient of, is marked." : "") }));
    return;
  }
  const list = make("dl"), tell = (name, ...what) => what.length && list.append(make("dt", { text: name }), make("dd", {}, ...what));
  const to = (other) => make("button", { type: "button", class: part(other), text: other.n, on: { click: () => choose(other, true) } });
  const kind = state.graph.inputs;
  const value = (name) => {
    const maker = state.makers.get(name);
    return maker ? to(maker) : make("span", { text: `${name}${kind[name] ? ` (${kind[name]})` : ""} ` });
  };
  tell("name", node.n);
  tell("part of the step", part(node));
  if (node.m) tell("module", node.m);
  if (node.r && node.r !== node.n && node.r !== node.f) tell("stands for", node.r);
  if (node.f) tell("gradient of", state.byName.has(node.f) ? to(state.byName.get(node.f)) : node.f);
  const related = [...partners([node])].filter((other) => other.p === BACKWARD && node.p !== BACKWARD);
  if (related.length) tell("its gradient", ...related.slice(0, 30).map(to));
  if (node.w) tell("moves", node.w);
  if (node.made) tell("makes", bytes(node.made));
  if (node.seconds) tell("time", `${share(node.seconds)} of the step; timed alone, ${time(node.seconds)}`);
  tell("reads", ...(node.i || []).map(value));
  const after = [...around(node)[1]];
  if (after.length) tell("is read by", ...after.slice(0, 30).map(to), ...(after.length > 30 ? [`and ${after.length - 30} more`] : []));
  box.replaceChildren(make("h2", { text: operator(node) }), list);
}

// --- memory and time over the step ---------------------------------------------------------------------------

function drawOver() {
  const { moments, times, nodes } = state.graph, box = byId("over"), charts = make("div", { class: "charts" });
  if (moments.length) charts.append(memoryChart(moments, nodes));
  if (times) {
    const bars = make("div", { class: "bars" }), most = Math.max(...Object.values(times.places));
    for (const [name, seconds] of Object.entries(times.places)) {
      const bar = make("span", { class: `bar ${name}`, style: `width: ${(100 * seconds) / most}%` });
      bars.append(make("span", { text: name }), bar, make("span", { class: "number", text: share(seconds) }));
    }
    charts.append(make("figure", {}, make("h2", { text: `Time: ${time(times.seconds)} a step` }), bars,
      make("figcaption", { text: `The median of ${times.steps} steps. Bars are shares of the ${time(state.timed)} that its nodes took, timed one by one.` })));
  }
  box.replaceChildren(charts);
}

function memoryChart(moments, nodes) {
  const totals = moments.map((m) => m[2] + m[3] + m[4]), most = Math.max(...totals, 1), worst = totals.indexOf(Math.max(...totals));
  const buckets = Math.min(moments.length, 600), per = moments.length / buckets;
  const columns = Array.from({ length: buckets }, (_, i) => {
    const range = totals.slice(Math.floor(i * per), Math.max(Math.floor((i + 1) * per), Math.floor(i * per) + 1));
    return moments[Math.floor(i * per) + range.indexOf(Math.max(...range))];
  });
  const chart = make("svg", { class: "chart", viewBox: `0 0 ${buckets} 100`, preserveAspectRatio: "none", role: "img",
    "aria-label": `Memory over the step: at most ${bytes(most)} live at once, after ${worst + 1} of ${moments.length} operations` });
  let below = columns.map(() => 0);
  KINDS.forEach((name, which) => {
    const above = columns.map((m, i) => below[i] + m[2 + which]);
    const y = (v) => (100 - (96 * v) / most).toFixed(2);
    const up = above.map((v, i) => `L${i} ${y(v)}L${i + 1} ${y(v)}`).join("");
    const down = below.map((v, i) => `L${i + 1} ${y(v)}L${i} ${y(v)}`).reverse().join("");
    chart.append(make("path", { d: `M0 ${y(below[0])}${up}${down}Z`, style: `fill: var(--${["forward", "backward", "update"][which]}); opacity: .75` }));
    below = above;
  });
  if (state.chosen) {
    moments.forEach((m, i) => {
      if (m[0] === state.chosen.index) chart.append(make("line", { class: "at", x1: i / per, x2: i / per, y1: 0, y2: 100 }));
    });
  }
  const words = make("figcaption");
  const tell = (i) => {
    const m = moments[i], node = nodes[m[0]];
    words.textContent = `${bytes(totals[i])} live after operation ${i + 1} of ${moments.length}${node ? `, ${operator(node)} (${node.n})` : ""}: ` +
      KINDS.map((name, k) => `${name} ${bytes(m[2 + k])}`).join(", ");
  };
  const at = (event) => {
    const r = chart.getBoundingClientRect();
    return Math.min(Math.max(Math.floor(((event.clientX - r.left) / r.width) * moments.length), 0), moments.length - 1);
  };
  chart.addEventListener("mousemove", (event) => tell(at(event)));
  chart.addEventListener("mouseleave", () => tell(worst));
  chart.addEventListener("click", (event) => { const node = nodes[moments[at(event)][0]]; if (node) choose(node, true); });
  tell(worst);
  const go = nodes[moments[worst][0]];
  const peak = go ? [make("button", { type: "button", text: "go there", on: { click: () => choose(go, true) } })] : [];
  return make("figure", {}, make("h2", { text: `Memory: at most ${bytes(most)} besides weights and batch ` }, ...peak), chart, words);
}

// --- weights -------------------------------------------------------------------------------------------------

function drawWeights() {
  const rows = data.weights, of = (kind) => rows.filter((w) => w.k === kind);
  const kinds = [...new Set(rows.map((w) => w.k))].map((kind) => `${of(kind).length} ${kind} (${bytes(sum(of(kind).map((w) => w.b)))})`);
  const table = make("table"), body = make("tbody");
  const head = [["name"], ["element type"], ["shape"], ["is"], ["size", "number"]];
  const kept = rows.some((w) => w.x);
  if (kept) head.push(["optimizer", "number"]);
  table.append(make("thead", {}, make("tr", {}, ...head.map(([text, kind]) => make("th", { text, scope: "col", class: kind })))), body);
  for (const w of rows) {
    body.append(make("tr", {}, make("td", { text: w.n }), make("td", { text: w.t }), make("td", { text: w.s.join(" × ") || "scalar" }),
      make("td", { text: w.k }), make("td", { text: bytes(w.b), class: "number" }),
      ...(kept ? [make("td", { text: w.x ? bytes(w.x) : "", class: "number" })] : [])));
  }
  byId("weights").append(make("h2", { text: "Weights" }), make("p", { text: kinds.join(", ") || "none" }), table);
}

// --- tools and keys ------------------------------------------------------------------------------------------

function search(words, forward = false) {
  if (words !== state.words) {
    state.words = words;
    state.found = -1;
    const low = words.toLowerCase();
    state.matches = low ? state.graph.nodes.filter((n) => [n.n, n.o, n.m, n.w, n.r].some((x) => x && x.toLowerCase().includes(low))) : [];
    mark();
  }
  if (forward && state.matches.length) {
    state.found = (state.found + 1) % state.matches.length;
    choose(state.matches[state.found], true);
  }
  byId("found").textContent = words ? `${state.found >= 0 ? `${state.found + 1} of ` : ""}${state.matches.length} nodes` : "";
}

function everyRow(open) {
  const stack = [...state.root.children.values()];
  while (stack.length) {
    const row = stack.pop();
    row.open = open && canOpen(row);
    stack.push(...row.children.values());
  }
  draw();
}

function move(i) {
  const elements = rowElements();
  if (!elements[i]) return;
  elements[state.focus]?.setAttribute("tabindex", "-1");
  state.focus = i;
  elements[i].setAttribute("tabindex", "0");
  elements[i].focus();
}

function key(event) {
  const element = event.target.closest(".row"), row = element && element.row;
  if (!row) return;
  const chips = [...element.querySelectorAll(".chip")], on = chips.indexOf(event.target);
  const act = {
    ArrowDown: () => move(state.focus + 1), ArrowUp: () => move(state.focus - 1),
    Home: () => move(0), End: () => move(state.rows.length - 1),
    ArrowRight: () => (on < 0 && canOpen(row) && !row.open ? toggle(row) : (chips[on + 1] || event.target).focus()),
    ArrowLeft: () => {
      if (on > 0) chips[on - 1].focus();
      else if (on === 0) element.focus();
      else if (row.open && canOpen(row)) toggle(row);
      else move(Math.max(state.rows.findIndex(([other]) => other === row.parent), 0));
    },
    Enter: () => (on >= 0 ? event.target.click() : chips[0] ? chips[0].click() : toggle(row)),
  }[event.key];
  if (act) { event.preventDefault(); act(); }
}

function begin() {
  document.title = `${data.title} · gradgraph`;
  byId("title").textContent = data.title;
  byId("facts").append(...data.facts.map(([name, text]) => make("div", {}, make("dt", { text: name }), make("dd", { text }))));
  const used = new Set(data.graphs.flatMap((graph) => graph.nodes.map(part)));
  byId("legend").append(...data.parts.filter((name) => used.has(name)).map((name) => make("li", { text: name, class: name })));
  byId("beside").hidden = !used.has("backward");
  if (data.graphs.length > 1) {
    byId("steps").append(...data.graphs.map((graph, i) => make("button", { type: "button", text: graph.name, on: { click: () => show(i) } })));
  }
  byId("search").addEventListener("input", (event) => search(event.target.value));
  byId("search").addEventListener("keydown", (event) => { if (event.key === "Enter") search(event.target.value, true); });
  byId("open").addEventListener("click", () => everyRow(true));
  byId("close").addEventListener("click", () => everyRow(false));
  byId("rows").addEventListener("keydown", key);
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") { state.chosen = null; state.over = null; byId("search").value = ""; search(""); mark(); describe(null); drawOver(); }
    if (event.key === "/" && !["INPUT", "SELECT"].includes(event.target.tagName)) { event.preventDefault(); byId("search").focus(); }
  });
  let waiting = 0;
  addEventListener("resize", () => { cancelAnimationFrame(waiting); waiting = requestAnimationFrame(() => { drawFlow(); mark(); }); });
  drawWeights();
  show(0);
  const wanted = decodeURIComponent(location.hash.slice(1)), node = wanted && state.byName.get(wanted);
  if (node) choose(node, true);
}

begin();
