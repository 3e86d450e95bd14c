// Draws the curves of a page from its JSON, and keeps them up to date while the run is running.
// Elements with data-chart say what they show: rows and columns of the JSON.
"use strict";

const REFRESH_MS = 10000;
const WHOLE = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000];
const STROKES = ["--curve", "--second", "--third", "--fourth", "--fifth", "--sixth"];
const drawn = new Map(); // element to its chart and the number of its series
let sources = new Map();

function load(source) {
  if (!sources.has(source)) {
    sources.set(source, fetch(source).then((answer) => {
      if (!answer.ok) throw new Error(`${source}: ${answer.status}`);
      return answer.json();
    }));
  }
  return sources.get(source);
}

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function figure(value) {
  if (value === null || value === undefined) return "–";
  const short = Number(value.toPrecision(4)), size = Math.abs(short);
  return (size && size < 1e-3 ? short.toExponential() : String(short)).replaceAll("-", "−");
}

// The width of an axis that its longest label needs, in CSS pixels.
function room(chart, labels, axis, cycle) {
  const { _size, ticks, gap, font } = chart.axes[axis];
  if (cycle > 1) return _size;
  chart.ctx.font = font[0];
  const widths = (labels ?? []).map((label) => chart.ctx.measureText(label).width / devicePixelRatio);
  return Math.ceil(Math.max(32, ticks.size + gap + Math.max(0, ...widths) + 4));
}

function axes(time) {
  const line = { grid: { stroke: colour("--line"), width: 0.5 }, ticks: { stroke: colour("--line") }, stroke: colour("--quiet") };
  const whole = time ? {} : { incrs: WHOLE, values: (_, ticks) => ticks.map(String) };
  return [{ ...line, ...whole }, { ...line, size: room, values: (_, ticks) => ticks.map(figure) }];
}

// "metrics.kl" of a row
function pick(row, path) {
  const value = path.split(".").reduce((part, name) => (part === null || part === undefined ? null : part[name]), row);
  return typeof value === "number" ? value : null;
}

function smoothing() {
  return Number(document.getElementById("smoothing")?.value ?? 1);
}

// The mean of a value and of those before it, at most `width` in all; a gap stays a gap and begins anew.
function smooth(values, width) {
  let window = [];
  return values.map((value) => {
    if (value === null) { window = []; return null; }
    window = [...window, value].slice(-width);
    return window.reduce((sum, one) => sum + one, 0) / window.length;
  });
}

// Points further apart than `widest` get an empty one between them: a pause is a gap and no diagonal.
function withGaps(data, widest) {
  const out = data.map(() => []);
  data[0].forEach((x, i) => {
    if (i && x - data[0][i - 1] > widest) {
      out.forEach((column, j) => column.push(j ? null : data[0][i - 1] + widest));
    }
    out.forEach((column, j) => column.push(data[j][i]));
  });
  return out;
}

function describe(element, name, values) {
  const known = values.filter((value) => value !== null);
  if (known.length) {
    element.setAttribute("aria-label", `${element.getAttribute("aria-label")}; ${name} from ${figure(known[0])} to ${figure(known[known.length - 1])}`);
  }
}

// Makes the steps of a chart selectable with the arrow keys; Enter opens the selected one.
function selectable(element, open) {
  const select = (index) => {
    const { chart } = drawn.get(element), step = chart.data[0][index];
    chart.setCursor({ left: chart.valToPos(step, "x"), top: chart.over.clientHeight / 2 });
    const said = chart.series.map((one, i) => (one.class === "edge" ? "" : `${one.label} ${figure(chart.data[i][index])}`));
    element.setAttribute("aria-valuenow", step);
    element.setAttribute("aria-valuetext", said.filter(Boolean).join(", "));
  };
  element.setAttribute("role", "slider");
  element.tabIndex = 0;
  element.addEventListener("keydown", (event) => {
    const { chart } = drawn.get(element), steps = chart.data[0], last = steps.length - 1;
    const now = steps.indexOf(Number(element.getAttribute("aria-valuenow")));
    const to = { ArrowLeft: now - 1, ArrowDown: now - 1, ArrowRight: now + 1, ArrowUp: now + 1, Home: 0, End: last }[event.key];
    if (event.key === "Enter") open(steps[now]);
    else if (to !== undefined) select(Math.min(Math.max(to, 0), last));
    else return;
    event.preventDefault();
  });
  return select;
}

// `lines`: label, values, stroke, and `low` and `high` where there is an interval. A line without neighbouring points
// gets its intervals as whiskers, others as a band. Lines over steps connect the steps that have a value.
function plot(element, xs, lines, { time = false, widest = Infinity } = {}) {
  element.removeAttribute("aria-busy");
  const empty = !lines.some((line) => line.values.some((value) => value !== null));
  element.toggleAttribute("data-empty", empty);
  if (empty) {
    element.textContent = "Nothing to draw yet.";
    return;
  }
  const width = smoothing(), data = [xs], series = [{ label: time ? "time" : "step" }], bands = [], whiskers = [];
  for (const line of lines) {
    describe(element, line.label, line.values);
    if (width > 1) {
      data.push(line.values);
      series.push({ label: line.label, class: "edge", stroke: `${line.stroke}66`, width: 1, points: { show: false } });
    }
    data.push(width > 1 ? smooth(line.values, width) : line.values);
    series.push({ label: line.label, stroke: line.stroke, width: 2 });
    if (!line.low) continue;
    const alone = !line.values.some((value, i) => i && value !== null && line.values[i - 1] !== null && (!time || xs[i] - xs[i - 1] <= widest));
    const edge = { class: "edge", stroke: "transparent", points: { show: false } };
    data.push(line.high, line.low);
    series.push({ ...edge, label: "high" }, { ...edge, label: "low" });
    if (alone) whiskers.push({ stroke: line.stroke, high: data.length - 2, low: data.length - 1 });
    else if (width === 1) bands.push({ series: [data.length - 2, data.length - 1], fill: `${line.stroke}33` });
  }
  const shown = time ? withGaps(data, widest) : data, known = drawn.get(element);
  if (known && known.series === series.length && known.width === width) {
    known.chart.setData(shown);
    return;
  }
  element.replaceChildren();
  const open = (step) => { if (Number.isInteger(step)) location.href = element.dataset.link + step; };
  const few = (chart, i) => chart.data[i].filter((value) => value !== null && value !== undefined).length < chart.bbox.width / devicePixelRatio / 8;
  const height = element.classList.contains("small") ? 160 : 280;
  const whisker = (chart) => {
    for (const { stroke, high, low } of whiskers) {
      chart.ctx.strokeStyle = stroke;
      chart.ctx.lineWidth = 2 * devicePixelRatio;
      chart.data[0].forEach((x, i) => {
        if (chart.data[high][i] === null || chart.data[high][i] === undefined) return;
        const at = chart.valToPos(x, "x", true);
        chart.ctx.beginPath();
        chart.ctx.moveTo(at, chart.valToPos(chart.data[high][i], "y", true));
        chart.ctx.lineTo(at, chart.valToPos(chart.data[low][i], "y", true));
        chart.ctx.stroke();
      });
    }
  };
  const chart = new uPlot({
    width: element.clientWidth, height, axes: axes(time), bands, hooks: { draw: [whisker] },
    scales: { x: { time, range: (_, low, high) => (low === high ? [low - 1, high + 1] : [low, high]) } },
    cursor: { sync: { key: time ? "time" : "step" } },
    series: series.map((one, i) => (i ? { value: (_, value) => figure(value), spanGaps: !time, points: { show: few, size: 5 }, ...one } : one)),
  }, shown, element);
  const select = element.dataset.link && (known?.select ?? selectable(element, open));
  if (select) {
    chart.over.classList.add("linked");
    chart.over.addEventListener("click", () => open(chart.data[0][chart.cursor.idx]));
  }
  if (!known) {
    new ResizeObserver(() => drawn.get(element).chart.setSize({ width: element.clientWidth, height })).observe(element);
  }
  known?.chart.destroy();
  drawn.set(element, { chart, series: series.length, width, select });
  if (select && !element.hasAttribute("aria-valuenow")) element.setAttribute("aria-valuenow", xs[xs.length - 1]);
}

// One line for training and one for held-out runs, with intervals.
function splits(element, page) {
  const { rows, names } = element.dataset;
  const chosen = page[rows].filter((row) => row.name === undefined || row.name === names);
  const xs = [...new Set(chosen.map((row) => row.step))].sort((a, b) => a - b);
  const lines = [...new Set(chosen.map((row) => row.split))].sort().map((split) => {
    const of = new Map(chosen.filter((row) => row.split === split).map((row) => [row.step, row]));
    const at = (value) => xs.map((x) => (of.has(x) ? value(of.get(x)) : null));
    return {
      label: split === "val" ? "held-out" : "training", stroke: colour(STROKES[split === "val" ? 1 : 0]), values: at((row) => row.mean),
      high: at((row) => row.high), low: at((row) => row.low),
    };
  });
  plot(element, xs, lines, { widest: page.width });
}

function line(element, page) {
  const { rows, x, y, names } = element.dataset, time = x === "at", paths = y.split(",");
  const lines = names.split(",").map((label, i) => ({ label, stroke: colour(STROKES[i % 2]), values: page[rows].map((row) => pick(row, paths[i])) }));
  plot(element, page[rows].map((row) => row[x]), lines, { time, widest: time ? page.seconds : page.width });
}

function compare(element, page) {
  const { rows, x, y } = element.dataset;
  const chosen = page.sides.map((side) => side[rows].filter((row) => row.split === undefined || row.split === "train"));
  const xs = [...new Set(chosen.flatMap((side) => side.map((row) => row[x])))].sort((a, b) => a - b);
  const lines = page.sides.map((side, i) => {
    const of = new Map(chosen[i].map((row) => [row[x], pick(row, y)]));
    return { label: `${side.run.split("/").pop()} ${side.branch}`, stroke: colour(STROKES[i]), values: xs.map((at) => of.get(at) ?? null) };
  });
  plot(element, xs, lines, { widest: Math.max(...page.sides.map((side) => side.width)) });
}

const charts = { splits, line, compare };

function draw() {
  for (const element of document.querySelectorAll("[data-chart]")) {
    element.dataset.label ??= element.getAttribute("aria-label");
    load(element.dataset.source)
      .then((page) => {
        element.setAttribute("aria-label", element.dataset.label);
        charts[element.dataset.chart](element, page);
      })
      .catch((error) => { element.removeAttribute("aria-busy"); if (!drawn.has(element)) element.textContent = `The curve could not be loaded (${error.message}).`; });
  }
}

function redraw() {
  for (const [element, { chart }] of drawn) { chart.destroy(); element.replaceChildren(); }
  drawn.clear();
  draw();
}

const choice = document.getElementById("smoothing");
if (choice) {
  choice.value = sessionStorage.getItem("smoothing") ?? "1";
  choice.addEventListener("change", () => { sessionStorage.setItem("smoothing", choice.value); draw(); });
}
draw();
setInterval(() => {
  if (document.hidden || !document.querySelector(".summary.running")) return;
  sources = new Map();
  draw();
}, REFRESH_MS);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
