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

function axes() {
  const axis = { stroke: colour("--quiet"), grid: { stroke: colour("--line"), width: 0.5 }, ticks: { stroke: colour("--line") } };
  return [axis, axis];
}

function plot(element, data, series, bands) {
  element.replaceChildren();
  if (!data[0].length) {
    element.textContent = "Nothing to draw yet.";
    return;
  }
  const height = element.classList.contains("small") ? 160 : 280;
  const chart = new uPlot(
    { width: element.clientWidth, height, scales: { x: { time: false } }, axes: axes(), series: [{ label: "step" }, ...series], bands },
    data, element,
  );
  new ResizeObserver(() => chart.setSize({ width: element.clientWidth, height })).observe(element);
}

function reward(element, page) {
  const splits = [...new Set(page.curve.map((row) => row.split))];
  const steps = [...new Set(page.curve.map((row) => row.step))].sort((a, b) => a - b);
  const data = [steps], series = [], bands = [];
  splits.forEach((split, i) => {
    const rows = new Map(page.curve.filter((row) => row.split === split).map((row) => [row.step, row]));
    const stroke = colour(i ? "--second" : "--curve");
    const at = (pick) => steps.map((step) => (rows.has(step) ? pick(rows.get(step)) : null));
    const first = data.length;
    data.push(at((row) => row.mean), at((row) => (row.half === null ? null : row.mean + row.half)),
      at((row) => (row.half === null ? null : row.mean - row.half)));
    const edge = { stroke: "transparent", points: { show: false } };
    series.push({ label: split === "val" ? "held-out" : "training", stroke, width: 2 },
      { ...edge, label: "95 % high" }, { ...edge, label: "95 % low" });
    bands.push({ series: [first + 1, first + 2], fill: stroke + "33" });
  });
  plot(element, data, series, bands);
}

function metric(element, page) {
  const name = element.dataset.metric;
  const rows = page.steps.filter((row) => typeof row.metrics[name] === "number");
  plot(element, [rows.map((row) => row.step), rows.map((row) => row.metrics[name])],
    [{ label: name, stroke: colour("--curve"), width: 1.5 }], []);
}

function compare(element, page) {
  const steps = [...new Set(page.sides.flatMap((side) => side.curve.map((row) => row.step)))].sort((a, b) => a - b);
  const data = [steps], series = [];
  page.sides.forEach((side, i) => {
    const rows = new Map(side.curve.filter((row) => row.split === "train").map((row) => [row.step, row.mean]));
    data.push(steps.map((step) => rows.get(step) ?? null));
    series.push({ label: `${side.run} ${side.branch}`, stroke: colour(i ? "--second" : "--curve"), width: 2 });
  });
  plot(element, data, series, []);
}

const charts = { reward, metric, compare };

for (const element of document.querySelectorAll("[data-chart]")) {
  load(element.dataset.source)
    .then((page) => charts[element.dataset.chart](element, page))
    .catch((error) => { element.textContent = `The curve could not be loaded (${error.message}).`; });
}
