// Loss, throughput and staleness over time. uPlot draws; plans are thin marks, so that one sees what a change did.

import { byId, compact } from "./format.js";

const HEIGHT = 176;
const MARKS_TALL_MAX = 12;
const STEPS_UNSETTLED = 4;
const [AT, STEP, LOSS, VALIDATION, PACE, STALE] = [0, 1, 2, 3, 4, 5];

export class Charts {
  constructor() {
    this.generation = -1;
    this.columns = [[], [], [], [], [], []];
    this.plans = [];
    this.charts = [];
    this.drawn = "";
    new ResizeObserver(() => this.resize()).observe(byId("curves"));
  }

  take(growth, changes) {
    if (growth.generation !== this.generation || growth.first === 0) {
      this.generation = growth.generation;
      this.columns = [[], [], [], [], [], []];
    }
    for (const point of growth.points) point.forEach((value, index) => this.columns[index].push(value));
    // The role moves every minute: what is worth a mark is who came, went or moved.
    this.plans = changes.filter((change) => change.kind === "plan" && !change.text.includes("hand-over from")).map((change) => change.at_s);
  }

  // Drawing is dear: only what has changed, and only while somebody can see it.
  draw() {
    const style = getComputedStyle(document.documentElement);
    const theme = ["--quiet", "--line", "--accent", "--second"].map((name) => style.getPropertyValue(name).trim());
    const drawn = [theme, this.generation, this.columns[AT].length, this.plans.length, this.plans[0]].join();
    if (drawn === this.drawn) return;
    if (!this.charts.length || this.drawn.split(",", theme.length).join() !== theme.join()) this.build(theme);
    this.drawn = drawn;
    for (const chart of this.charts) chart.plot.setData([this.columns[AT], ...chart.of.map((index) => this.columns[index])]);
  }

  build(theme) {
    for (const chart of this.charts) chart.plot.destroy();
    const [quiet, line, accent, second] = theme;
    const font = "11px system-ui, sans-serif";
    const axis = { stroke: quiet, font, grid: { stroke: line, width: 1 }, ticks: { show: false } };
    const make = (id, of, series, range) => {
      const target = byId(id);
      const plot = new window.uPlot({
        width: Math.max(200, target.clientWidth),
        height: HEIGHT,
        padding: [8, 20, 0, 0],
        cursor: { sync: { key: "shoal" }, y: false, points: { size: 6 }, drag: { x: true, y: false } },
        legend: { live: true, markers: { show: false } },
        scales: { x: { time: true }, y: { range } },
        axes: [
          { ...axis, space: 64, size: 28, values: (u, splits) => splits.map((at) => clock(at, splits)) },
          { ...axis, size: 46, space: 34, values: (u, splits) => splits.map((value) => short(value)) },
        ],
        series: [{ label: "at", value: (u, at) => (at === null ? "now" : `${clock(at)}, step ${this.stepAt(u)}`) }, ...series],
        hooks: { drawClear: [(u) => this.markPlans(u, quiet)] },
      }, [[], ...of.map(() => [])], target);
      this.charts.push({ plot, of, target });
    };
    // Without a pointer the legend says the newest.
    const number = (digits) => (u, value, series) => {
      const said = value ?? (u.cursor.idx === null || u.cursor.idx === undefined ? newest(u.data[series]) : null);
      return said === null ? "–" : digits === null ? compact(said) : said.toFixed(digits);
    };
    const area = `${accent}22`;
    this.charts = [];
    make("chart-loss", [LOSS, VALIDATION], [
      { label: "loss", stroke: accent, width: 1.5, points: { show: false }, spanGaps: true, value: number(3) },
      { label: "validation", stroke: second, width: 1.5, dash: [], points: { show: true, size: 5, fill: second }, spanGaps: true, value: number(3) },
    ], (u, low, high) => padded(low, high));
    make("chart-pace", [PACE], [{ label: "tokens/s", stroke: accent, fill: area, width: 1.5, points: { show: false }, value: number(null) }], (u, low, high) => [0, (this.settled(u.data[1], high) || 1) * 1.1]);
    make("chart-stale", [STALE], [{ label: "steps", stroke: accent, fill: area, width: 1.5, points: { show: false }, value: number(2) }], (u, low, high) => [0, Math.max(0.1, (high || 0) * 1.15)]);
  }

  // A pace over one or two steps may be ten times what it will be, and would flatten the rest of the curve.
  settled(paces, high) {
    const usual = paces.filter((pace, index) => pace !== null && this.columns[STEP][index] > STEPS_UNSETTLED);
    return usual.length ? Math.min(high, Math.max(...usual)) : high;
  }

  stepAt(plot) {
    const step = this.columns[STEP][plot.cursor.idx];
    return step === undefined ? "" : step;
  }

  markPlans(plot, color) {
    const { ctx, bbox } = plot;
    const height = this.plans.length > MARKS_TALL_MAX ? 7 * devicePixelRatio : bbox.height;
    ctx.save();
    ctx.strokeStyle = color;
    ctx.globalAlpha = this.plans.length > MARKS_TALL_MAX ? 0.7 : 0.35;
    if (height === bbox.height) ctx.setLineDash([2 * devicePixelRatio, 4 * devicePixelRatio]);
    ctx.beginPath();
    for (const at of this.plans) {
      const x = Math.round(plot.valToPos(at, "x", true)) + 0.5;
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
}

function newest(values) {
  for (let index = values.length - 1; index >= 0; index -= 1) if (values[index] !== null && values[index] !== undefined) return values[index];
  return null;
}

function padded(low, high) {
  if (low === null || high === null) return [0, 1];
  const room = Math.max((high - low) * 0.08, 0.02);
  return [Math.max(0, low - room), high + room];
}

function short(value) {
  return Math.abs(value) >= 1000 ? compact(value).replace(/\.?0+(?=[a-zA-Z])/, "") : String(Math.round(value * 1000) / 1000);
}

function clock(at_s, splits) {
  const time = new Date(at_s * 1000);
  const days = splits && splits.length > 1 && splits[splits.length - 1] - splits[0] > 172800;
  if (days) return time.toLocaleDateString([], { day: "numeric", month: "short" });
  const seconds = splits && splits.length > 1 && splits[1] - splits[0] < 60 ? { second: "2-digit" } : {};
  return time.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", hour12: false, ...seconds });
}
