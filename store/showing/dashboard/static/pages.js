// Draws the curves of a page from its JSON. Elements with data-chart say which.
"use strict";

const sources = new Map();

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
  return value === null || value === undefined ? "–" : String(Number(value.toPrecision(4)));
}

function axes() {
  const line = { grid: { stroke: colour("--line"), width: 0.5 }, ticks: { stroke: colour("--line") }, stroke: colour("--quiet") };
  return [line, { ...line, size: 64, values: (_, ticks) => ticks.map(figure) }];
}

// "metrics.kl" of a row
function pick(row, path) {
  const value = path.split(".").reduce((part, name) => (part === null || part === undefined ? null : part[name]), row);
  return typeof value === "number" ? value : null;
}

function describe(element, name, values) {
  const known = values.filter((value) => value !== null);
  if (known.length) {
    element.setAttribute("aria-label", `${element.getAttribute("aria-label")}; ${name} from ${figure(known[0])} to ${figure(known[known.length - 1])}`);
  }
}

function plot(element, data, series, { bands = [], time = false } = {}) {
  element.replaceChildren();
  if (!data.slice(1).some((values) => values.some((value) => value !== null))) {
    element.textContent = "Nothing to draw yet.";
    return;
  }
  series.forEach((one, i) => { if (one.stroke !== "transparent") describe(element, one.label, data[i + 1]); });
  const height = element.classList.contains("small") ? 160 : 280;
  const shown = series.map((one) => ({ value: (_, value) => figure(value), spanGaps: true, ...one }));
  const chart = new uPlot(
    { width: element.clientWidth, height, scales: { x: { time } }, axes: axes(), series: [{ label: time ? "time" : "step" }, ...shown], bands },
    data, element,
  );
  new ResizeObserver(() => chart.setSize({ width: element.clientWidth, height })).observe(element);
}

const strokes = ["--curve", "--second"];

function reward(element, page) {
  const splits = [...new Set(page.curve.map((row) => row.split))].sort();
  const steps = [...new Set(page.curve.map((row) => row.step))].sort((a, b) => a - b);
  const data = [steps], series = [], bands = [];
  splits.forEach((split, i) => {
    const rows = new Map(page.curve.filter((row) => row.split === split).map((row) => [row.step, row]));
    const stroke = colour(strokes[i % 2]);
    const at = (value) => steps.map((step) => (rows.has(step) ? value(rows.get(step)) : null));
    const first = data.length;
    data.push(at((row) => row.mean), at((row) => (row.half === null ? null : row.mean + row.half)),
      at((row) => (row.half === null ? null : row.mean - row.half)));
    const edge = { stroke: "transparent", points: { show: false } };
    series.push({ label: split === "val" ? "held-out" : "training", stroke, width: 2, spanGaps: false },
      { ...edge, label: "95 % high" }, { ...edge, label: "95 % low" });
    bands.push({ series: [first + 1, first + 2], fill: stroke + "33" });
  });
  plot(element, data, series, { bands });
}

function line(element, page) {
  const { rows, x, y, names } = element.dataset;
  const found = page[rows], paths = y.split(",");
  const data = [found.map((row) => row[x]), ...paths.map((path) => found.map((row) => pick(row, path)))];
  const series = names.split(",").map((label, i) => ({ label, stroke: colour(strokes[i % 2]), width: 1.5 }));
  plot(element, data, series, { time: x === "at" });
}

function compare(element, page) {
  const { rows, x, y } = element.dataset;
  const kept = page.sides.map((side) => side[rows].filter((row) => row.split === undefined || row.split === "train"));
  const steps = [...new Set(kept.flatMap((side) => side.map((row) => row[x])))].sort((a, b) => a - b);
  const data = [steps], series = [];
  page.sides.forEach((side, i) => {
    const values = new Map(kept[i].map((row) => [row[x], pick(row, y)]));
    data.push(steps.map((step) => values.get(step) ?? null));
    series.push({ label: `${side.run.split("/").pop()} ${side.branch}`, stroke: colour(strokes[i]), width: 2 });
  });
  plot(element, data, series);
}

const charts = { reward, line, compare };

function draw() {
  for (const element of document.querySelectorAll("[data-chart]")) {
    element.dataset.label ??= element.getAttribute("aria-label");
    element.setAttribute("aria-label", element.dataset.label);
    load(element.dataset.source)
      .then((page) => charts[element.dataset.chart](element, page))
      .catch((error) => { element.textContent = `The curve could not be loaded (${error.message}).`; });
  }
}

draw();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
