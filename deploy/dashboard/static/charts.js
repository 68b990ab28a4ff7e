// The run's history as plots, drawn by uPlot. Plans are thin marks, which show the effect of each change.

import { save, vector } from "./downloads.js";
import { byId, compact } from "./kit.js";

const HEIGHT = 176;
const MARKS_TALL_MAX = 12;
const STEPS_UNSETTLED = 4;
const LOSS_MAX = 80; // a perplexity above e^80 is meaningless
const COLUMNS = ["at", "step", "loss", "pace", "stale", "rate", "norm"];
const CHARTS = [
  { id: "chart-loss", of: "loss", label: "loss", digits: 3, validates: true, logs: true },
  { id: "chart-pace", of: "pace", label: "tokens/s", digits: null },
  { id: "chart-norm", of: "norm", label: "gradient norm", digits: 3, logs: true },
  { id: "chart-rate", of: "rate", label: "learning rate", digits: null, logs: true },
  { id: "chart-stale", of: "stale", label: "steps stale", digits: 2 },
];

export class Charts {
  constructor() {
    this.generation = -1;
    this.points = empty();
    this.validations = [];
    this.plans = [];
    this.charts = [];
    this.drawn = "";
    this.version = 0;
    this.name = "run";
    new ResizeObserver(() => this.resize()).observe(byId("curves"));
    for (const id of ["across", "measure", "log", "smooth"]) byId(id).addEventListener("input", () => this.draw());
    byId("csv").addEventListener("click", () => save(`${this.name}.csv`, "text/csv", this.table()));
    byId("svg").addEventListener("click", () => save(`${this.name}.svg`, "image/svg+xml", vector(this.charts, this.colors)));
    byId("png").addEventListener("click", () => this.picture());
  }

  take(growth, changes) {
    if (growth.generation !== this.generation || growth.first === 0) {
      this.generation = growth.generation;
      this.points = empty();
    }
    for (const point of growth.points) COLUMNS.forEach((name, index) => this.points[name].push(point[index] ?? null));
    if (growth.validations) this.validations = growth.validations;
    if (growth.points.length || growth.validations) this.version += 1;
    // Mark plans in which peers came, went or moved, not the frequent transfers of the coordinator's role.
    this.plans = changes.filter((change) => change.kind === "plan" && !change.text.includes("hand-over from")).map((change) => change.at_s);
  }

  get chosen() {
    return {
      across: byId("across").value,
      perplexity: byId("measure").value === "perplexity",
      log: byId("log").checked,
      weight: Number(byId("smooth").value),
    };
  }

  // Drawing is expensive: draw only changes, and only while they are visible.
  draw() {
    const style = getComputedStyle(document.documentElement);
    this.colors = ["--quiet", "--line", "--accent", "--second", "--ink", "--card"].map((name) => style.getPropertyValue(name).trim());
    const { across, perplexity, log, weight } = this.chosen;
    const look = [...this.colors, across, perplexity, log, weight > 0].join();
    const drawn = [look, weight, this.version, this.plans.length, this.plans[0]].join();
    if (drawn === this.drawn) return;
    this.drawn = drawn;
    byId("smooth-says").textContent = weight ? weight.toFixed(2) : "none";
    if (look !== this.look) this.build();
    this.look = look;
    for (const chart of this.charts) chart.plot.setData(this.data(chart));
  }

  // x, measured values, their average, and validations at their positions.
  data(chart) {
    const { across, perplexity, weight } = this.chosen;
    const x = across === "time" ? rising(this.points.at) : this.points.step;
    const shown = perplexity && chart.of === "loss" ? power : (value) => value;
    const raw = this.points[chart.of].map(shown);
    const columns = weight ? [x, raw, averaged(raw, weight)] : [x, raw];
    if (!chart.validates) return columns;
    const validated = this.validations.map(([at, step, loss]) => [across === "time" ? at : step, shown(loss)]).sort((a, b) => a[0] - b[0]);
    return window.uPlot.join([columns, [validated.map((one) => one[0]), validated.map((one) => one[1])]]);
  }

  build() {
    for (const chart of this.charts) chart.plot.destroy();
    this.charts = CHARTS.map((chart) => ({ ...chart, target: byId(chart.id) }));
    for (const chart of this.charts) chart.plot = this.make(chart);
    byId("loss-title").textContent = this.chosen.perplexity ? "Perplexity" : "Loss";
  }

  make(chart) {
    const [quiet, line, accent, second] = this.colors;
    const { across, log, weight, perplexity } = this.chosen;
    const font = "11px system-ui, sans-serif";
    const axis = { stroke: quiet, font, grid: { stroke: line, width: 1 }, ticks: { show: false } };
    const label = perplexity && chart.of === "loss" ? "perplexity" : chart.label;
    const logs = log && chart.logs;
    chart.title = label;
    // Without a pointer the legend shows the newest values.
    const value = (u, said, series) => {
      const shown = said ?? (u.cursor.idx === null || u.cursor.idx === undefined ? newest(u.data[series]) : null);
      return shown === null || shown === undefined ? "–" : number(shown, chart.digits);
    };
    const fill = chart.of === "pace" || chart.of === "stale" ? `${accent}22` : undefined;
    const series = [
      { label: across === "time" ? "at" : "step", value: (u, x) => this.says(x) },
      { label, stroke: weight ? `${accent}50` : accent, fill, width: weight ? 1 : 1.5, points: { show: false }, spanGaps: true, value },
    ];
    if (weight) series.push({ label: "average", stroke: accent, width: 2, points: { show: false }, spanGaps: true, value });
    if (chart.validates) series.push({ label: "validation", stroke: second, width: 1.5, points: { show: true, size: 5, fill: second }, spanGaps: true, value });
    const values = across === "time" ? (u, splits) => splits.map((at) => clock(at, splits)) : (u, splits) => splits.map((step) => (Number.isInteger(step) ? short(step) : ""));
    return new window.uPlot({
      width: Math.max(200, chart.target.clientWidth),
      height: HEIGHT,
      padding: [8, 20, 0, 0],
      cursor: { sync: { key: "shoal", scales: ["x", null] }, y: false, points: { size: 6 }, drag: { x: true, y: false } },
      legend: { live: true, markers: { show: false } },
      scales: { x: { time: across === "time" }, y: { distr: logs ? 3 : 1, range: (u, low, high) => this.range(chart, u, low, high, logs) } },
      axes: [
        { ...axis, space: 64, size: 28, values },
        { ...axis, size: 50, space: logs ? 22 : 34, values: (u, splits) => splits.map((split) => (split === null ? "" : short(split))), ...(logs ? { filter: (u, splits) => marked(splits) } : {}) },
      ],
      series,
      hooks: { drawClear: [(u) => this.markPlans(u, quiet)] },
    }, [[], ...series.slice(1).map(() => [])], chart.target);
  }

  range(chart, u, low, high, logs) {
    if (low === null || high === null) return logs ? [0.1, 1] : [0, 1];
    if (logs) return [low / 1.1, high * 1.1];
    if (chart.of === "pace") return [0, (this.settled(u.data[1], high) || 1) * 1.1];
    if (chart.of === "stale") return [0, Math.max(0.1, high * 1.15)];
    const room = Math.max((high - low) * 0.08, Math.abs(high) * 0.01);
    return [Math.max(0, low - room), high + room];
  }

  // The rate over the first one or two steps may be ten times too high and would flatten the curve.
  settled(paces, high) {
    const usual = paces.filter((pace, index) => pace !== null && this.points.step[index] > STEPS_UNSETTLED);
    return usual.length ? Math.min(high, usual.reduce((most, pace) => Math.max(most, pace), 0)) : high;
  }

  // The pointer's position: `step 17, 14:05`.
  says(x) {
    if (x === null || x === undefined) return "now";
    const { across } = this.chosen;
    const { at, step } = this.points;
    const index = nearest(across === "time" ? at : step, x);
    if (index < 0) return across === "time" ? clock(x) : String(x);
    return across === "time" ? `${clock(x)}, step ${step[index]}` : `${x}, ${clock(at[index])}`;
  }

  markPlans(plot, color) {
    const { ctx, bbox } = plot;
    const height = this.plans.length > MARKS_TALL_MAX ? 7 * devicePixelRatio : bbox.height;
    const { at, step } = this.points;
    ctx.save();
    ctx.strokeStyle = color;
    ctx.globalAlpha = this.plans.length > MARKS_TALL_MAX ? 0.7 : 0.35;
    if (height === bbox.height) ctx.setLineDash([2 * devicePixelRatio, 4 * devicePixelRatio]);
    ctx.beginPath();
    for (const time of this.plans) {
      const index = this.chosen.across === "time" ? -1 : nearest(at, time);
      const where = this.chosen.across === "time" ? time : index < 0 ? null : step[index];
      if (where === null) continue;
      const x = Math.round(plot.valToPos(where, "x", true)) + 0.5;
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.moveTo(x, bbox.top + bbox.height - height);
      ctx.lineTo(x, bbox.top + bbox.height);
    }
    ctx.stroke();
    ctx.restore();
  }

  resize() {
    for (const { plot, target } of this.charts) {
      const width = target.clientWidth;
      if (width > 0 && width !== plot.width) plot.setSize({ width, height: HEIGHT });
    }
  }

  // The plotted data as CSV; validations have their own lines.
  table() {
    const { at, step, loss, pace, stale, rate, norm } = this.points;
    const cell = (value) => (value === null || value === undefined ? "" : String(value));
    const lines = ["step,time,loss,perplexity,validation_loss,learning_rate,gradient_norm,tokens_per_s,staleness_steps"];
    const rows = step.map((number, i) => [number, at[i], loss[i], power(loss[i]), null, rate[i], norm[i], pace[i], stale[i]]);
    for (const [time, number, value] of this.validations) rows.push([number, time, null, null, value, null, null, null, null]);
    rows.sort((a, b) => a[0] - b[0]);
    return [...lines, ...rows.map((row) => row.map(cell).join(","))].join("\n") + "\n";
  }

  // All plots below each other, as on the page.
  picture() {
    const sources = this.charts.map(({ plot, title }) => [title, plot.ctx.canvas]);
    const heading = 26 * devicePixelRatio;
    const canvas = document.createElement("canvas");
    canvas.width = Math.max(...sources.map(([, source]) => source.width));
    canvas.height = sources.reduce((sum, [, source]) => sum + source.height + heading, 0);
    const context = canvas.getContext("2d");
    const [, , , , ink, card] = this.colors;
    context.fillStyle = card;
    context.fillRect(0, 0, canvas.width, canvas.height);
    context.font = `${14 * devicePixelRatio}px system-ui, sans-serif`;
    let y = 0;
    for (const [label, source] of sources) {
      context.fillStyle = ink;
      context.fillText(label, 10 * devicePixelRatio, y + heading * 0.7);
      context.drawImage(source, 0, y + heading);
      y += source.height + heading;
    }
    canvas.toBlob((blob) => save(`${this.name}.png`, "image/png", blob));
  }
}

function empty() {
  return Object.fromEntries(COLUMNS.map((name) => [name, []]));
}

function power(loss) {
  return loss === null || loss === undefined ? null : Math.exp(Math.min(loss, LOSS_MAX));
}

// x must not decrease: a clock may have been set back.
function rising(times) {
  let last = -Infinity;
  return times.map((time) => (last = Math.max(last, time)));
}

// The exponential moving average with bias correction, as in TensorBoard.
function averaged(values, weight) {
  let sum = 0, share = 0;
  return values.map((value) => {
    if (value === null || value === undefined) return null;
    sum = sum * weight + value * (1 - weight);
    share = share * weight + (1 - weight);
    return sum / share;
  });
}

// The index of the last element of `sorted` that is at most `value`; -1: none.
function nearest(sorted, value) {
  let low = 0, high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] <= value) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

function newest(values) {
  for (let index = values.length - 1; index >= 0; index -= 1) if (values[index] !== null && values[index] !== undefined) return values[index];
  return null;
}

// Label only some marks of a logarithmic axis, for lack of room; its ends are not marks.
function marked(splits) {
  const ratio = splits[splits.length - 1] / splits[0];
  const fine = ratio < 4 ? [1, 2, 3, 4, 5, 6, 7, 8, 9] : ratio < 12 ? [1, 2, 3, 5] : ratio < 2000 ? [1, 2, 5] : [1];
  return splits.map((value) => {
    const digit = value / 10 ** Math.floor(Math.log10(value) + 1e-9);
    return fine.some((one) => Math.abs(digit - one) < 1e-6) ? value : null;
  });
}

function number(value, digits) {
  if (digits === null) return Math.abs(value) < 1 && value !== 0 ? value.toPrecision(3) : compact(value);
  return Math.abs(value) >= 1e4 ? value.toExponential(2) : value.toFixed(digits);
}

function short(value) {
  if (value !== 0 && Math.abs(value) < 0.001) return value.toExponential(0);
  return Math.abs(value) >= 1000 ? compact(value).replace(/\.0+(?=[a-zA-Z])/, "").replace(/(\.\d*?)0+(?=[a-zA-Z])/, "$1") : String(Math.round(value * 1000) / 1000);
}

function clock(at_s, splits) {
  const time = new Date(at_s * 1000);
  const days = splits && splits.length > 1 && splits[splits.length - 1] - splits[0] > 172800;
  if (days) return time.toLocaleDateString([], { day: "numeric", month: "short" });
  const seconds = splits && splits.length > 1 && splits[1] - splits[0] < 60 ? { second: "2-digit" } : {};
  return time.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", hour12: false, ...seconds });
}
