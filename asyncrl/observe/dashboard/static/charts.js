"use strict";
// Curves (uPlot), the heat map of ages and bars.

const AXIS = {
  stroke: DIM, ticks: { show: false }, font: "11px system-ui, Noto Sans, DejaVu Sans",
  grid: { stroke: DARK ? "#2b3038" : "#eceff2", width: 1 },
};

function smoothed(values, weight) {
  if (!weight) return values;
  let average = null;
  return values.map((value) => {
    if (value === null) return null;
    average = average === null ? value : weight * average + (1 - weight) * value;
    return average;
  });
}

// curves: [[metric, label, dashed?], ...]; each run that has one gets a line.
function chart(width, title, sub, curves, view, height = 190) {
  const box = element("div");
  const lines = [];
  for (const run of view.runs) {
    for (const [metric, label, dashed] of curves) {
      if (known(run.series[metric]).length) lines.push({ run, label, dashed, values: smoothed(run.series[metric], view.smoothing) });
    }
  }
  if (!lines.length) {
    box.append(element("div", { class: "sub" }, "not recorded in this run"));
    return card(width, title, sub, box);
  }
  const steps = [...new Set(lines.flatMap((line) => line.run.series.step))].sort((a, b) => a - b);
  const place = new Map(steps.map((step, index) => [step, index]));
  const colour = (line, index) => (view.runs.length === 1 ? RUN_COLOURS[index % RUN_COLOURS.length] : view.colour(line.run));
  const data = [steps, ...lines.map((line) => {
    const values = Array(steps.length).fill(null);
    line.run.series.step.forEach((step, index) => { values[place.get(step)] = line.values[index]; });
    return values;
  })];
  const options = () => ({
    width: Math.max(200, box.clientWidth), height,
    legend: { show: lines.length > 1 }, cursor: { sync: { key: "steps" }, points: { size: 6 } },
    scales: { x: { time: false } },
    axes: [{ ...AXIS, size: 26 }, { ...AXIS, size: 52, values: (_, ticks) => ticks.map((tick) => number(tick, 4)) }],
    series: [{ label: "step" }, ...lines.map((line, index) => ({
      label: (view.runs.length > 1 ? `${line.run.name} ` : "") + line.label, stroke: colour(line, index), width: 2,
      dash: line.dashed ? [5, 4] : undefined, spanGaps: true, points: { show: known(line.values).length < 14, size: 6 },
    }))],
    hooks: { setCursor: [(plot) => {
      const index = plot.cursor.idx;
      if (index === null || index === undefined || plot.cursor.left < 0 || !plot.cursor.event) return;
      const shown = lines.map((line, at) => [line, data[at + 1][index]]).filter(([, value]) => value !== null)
        .map(([line, value]) => `${view.runs.length > 1 ? line.run.name + " " : ""}${line.label} ${number(value, 4)}`);
      tip(plot.cursor.event, shown.length ? `step ${steps[index]}: ${shown.join(", ")}` : "");
    }] },
  });
  queueMicrotask(() => {
    if (!box.isConnected) return;
    const plot = new uPlot(options(), data, box);
    box.addEventListener("mouseleave", (event) => tip(event, ""));
    view.onresize.push(() => plot.setSize({ width: Math.max(200, box.clientWidth), height }));
  });
  const made = card(width, title, sub, box);
  made.querySelector("h3").title = curves.flatMap(([metric]) => meaning(metric, view)).join("\n");
  return made;
}

// The glossary's text of a metric, as a list of one; empty where it has none.
function meaning(metric, view) {
  return view.runs.map((run) => (run.meanings || {})[metric]).filter(Boolean).slice(0, 1);
}

function canvas(height, draw, view) {
  const made = element("canvas", { height });
  const redraw = () => {
    if (!made.isConnected) return;
    const ratio = devicePixelRatio || 1;
    made.width = made.clientWidth * ratio;
    made.height = height * ratio;
    made.style.height = `${height}px`;
    const context = made.getContext("2d");
    context.scale(ratio, ratio);
    context.font = "11px system-ui, Noto Sans, DejaVu Sans";
    draw(context, made.clientWidth);
  };
  queueMicrotask(redraw);
  view.onresize.push(redraw);
  return [made, redraw];
}

function ageMap(width, run, view) {
  const { steps, shares } = run.ages;
  const rows = Math.max(run.eta + 1, shares[0] ? shares[0].length : 1);
  const [made] = canvas(170, (context, wide) => {
    const left = 26, bottom = 148, high = (bottom - 4) / rows, across = (wide - left) / Math.max(1, steps.length);
    shares.forEach((share, column) => {
      for (let age = 0; age < rows; age += 1) {
        const part = share[age] || 0;
        context.fillStyle = part ? `rgba(47,111,222,${0.1 + 0.9 * part})` : DARK ? "#20242b" : "#f4f6f8";
        context.fillRect(left + column * across, bottom - (age + 1) * high, Math.max(0.6, across - 0.5), high - 1);
      }
    });
    context.fillStyle = DIM;
    for (let age = 0; age < rows; age += Math.ceil(rows / 12)) context.fillText(age, 8, bottom - age * high - high / 2 + 4);
    for (let column = 0; column < steps.length; column += Math.ceil(steps.length / 8)) context.fillText(steps[column], left + column * across, 164);
    const y = bottom - (run.eta + 1) * high;
    context.strokeStyle = "#d9534f";
    context.setLineDash([4, 3]);
    context.beginPath(); context.moveTo(left, y + 0.5); context.lineTo(wide, y + 0.5); context.stroke();
    context.setLineDash([]);
  }, view);
  return card(width, "Age of the trained tokens", `share of each step's tokens by age in versions; η = ${run.eta} is the line`, made);
}

function stepParts(run) {
  const count = (run.series["time/step_s"] || []).length, skipped = Math.min(5, Math.floor(count / 3));
  const take = (name) => mean((run.series[`time/${name}_s`] || []).slice(skipped));
  const total = take("step") || 1;
  const parts = Object.keys(PHASES).filter((name) => name !== "other").map((name) => [name, take(name)]);
  parts.push(["other", Math.max(0, total - parts.reduce((sum, [, value]) => sum + value, 0))]);
  return [total, parts];
}

function stepBar(width, run) {
  const [total, parts] = stepParts(run);
  const share = (value) => `${((100 * value) / total).toFixed(0)} %`;
  return card(width, "Where a step's time goes", `${number(total)} s a step, without the first steps`,
    element("div", { class: "bar" }, parts.map(([name, value]) => element("span", {
      style: { width: `${(100 * value) / total}%`, background: PHASES[name][1] }, title: `${PHASES[name][0]} ${number(value, 3)} s`,
    }))),
    element("div", { class: "key" }, parts.filter(([, value]) => value > 0.004 * total).map(([name, value]) =>
      element("span", {}, element("i", { style: { background: PHASES[name][1] } }), `${PHASES[name][0]} ${share(value)}`))));
}
