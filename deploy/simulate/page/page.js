// All names from files and peers are set as text, never as markup.
const data = JSON.parse(byId("data").textContent);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
const colour = (index) => "s" + (index % 8);

function seconds(value) {
  if (value >= 100) return value.toFixed(0) + " s";
  return value >= 1 ? value.toPrecision(3) + " s" : (value * 1000).toPrecision(3) + " ms";
}

function ticks(low, high, count) {
  const rough = (high - low) / count || 1, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough);
  const found = [];
  for (let k = Math.ceil(low / step); k * step <= high * (1 + 1e-9); k++) found.push(k * step);
  return found;
}

function tip(event, text) {
  const box = byId("tip");
  box.hidden = !text;
  if (!text) return;
  box.textContent = text;
  box.style.left = Math.min(event.clientX + 14, innerWidth - box.offsetWidth - 8) + "px";
  box.style.top = event.clientY + 14 + "px";
}

// --- throughput over time ---

function drawThroughput() {
  const box = byId("throughput"), W = Math.max(280, box.clientWidth || 1180), H = 300, L = 64, R = 24, T = 10, B = 46;
  const lines = data.strategies.filter((s) => s.pace.length);
  if (!lines.length) return void (box.textContent = "No strategy committed a step.");
  const end = Math.max(...lines.map((s) => s.pace.at(-1)[1]));
  const top = 1.08 * Math.max(...lines.flatMap((s) => s.pace.map((p) => p[2])));
  const x = (t) => L + (t / end) * (W - L - R), y = (v) => H - B - (v / top) * (H - T - B);
  const drawing = svg("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": "tokens per second over time" });
  for (const v of ticks(0, top, 5)) {
    drawing.append(svg("line", { x1: L, x2: W - R, y1: y(v), y2: y(v), stroke: "var(--line)" }));
    drawing.append(svg("text", { x: L - 8, y: y(v) + 4, "text-anchor": "end" }, compact(v)));
  }
  for (const t of ticks(0, end, Math.max(2, Math.floor(W / 110))))
    drawing.append(svg("text", { x: x(t), y: H - B + 18, "text-anchor": "middle" }, t + " s"));
  drawing.append(svg("text", { x: L - 8, y: H - 8, "text-anchor": "end" }, "tokens/s"));
  lines.forEach((s) => {
    const index = data.strategies.indexOf(s);
    for (const [t, change, text] of s.events) {
      const away = change === "left";
      const mark = svg("line", { x1: x(t), x2: x(t), y1: H - B, y2: H - B + (away ? -12 : 6), "stroke-width": 1.5,
        stroke: `var(--${colour(index)})`, opacity: change === "plan" ? 0.45 : 0.9 });
      mark.append(svg("title", {}, `${s.name}, ${t.toFixed(1)} s: ${text}`));
      if (t <= end) drawing.append(mark);
    }
    const d = s.pace.map(([from, to, v]) => `${x(from)},${y(v)} ${x(to)},${y(v)}`).join(" L");
    const line = svg("path", { d: "M" + d, fill: "none", stroke: `var(--${colour(index)})`, "stroke-width": 2 });
    line.append(svg("title", {}, s.name));
    drawing.append(line);
  });
  const keys = element("p", { class: "keys" });
  for (const s of lines) {
    const swatch = element("i", { style: `background:var(--${colour(data.strategies.indexOf(s))})` });
    keys.append(element("span", {}, swatch, s.name));
  }
  if (lines.some((s) => s.events.some((e) => e[1] === "left")))
    keys.append(element("span", {}, "marks: up, a device left; down, one joined or the plan changed"));
  box.replaceChildren(drawing, keys);
}

// --- what each device does ---

const KINDS = data.kinds;

class Gantt {
  constructor(box, chart) {
    this.chart = chart;
    this.low = chart.from;
    this.high = chart.to;
    this.row = chart.rows.length > 40 ? 10 : 16;
    this.gutter = this.room();
    this.axis = 22;
    this.canvas = element("canvas", { "aria-label": "timeline of each device" });
    box.replaceChildren(this.canvas);
    this.canvas.addEventListener("mousedown", (e) => (this.grip = this.time(e)));
    this.canvas.addEventListener("mousemove", (e) => this.hover(e));
    this.canvas.addEventListener("mouseleave", (e) => ((this.grip = null), tip(e, ""), this.draw()));
    this.canvas.addEventListener("mouseup", (e) => this.zoom(e));
    this.canvas.addEventListener("dblclick", () => this.show(chart.from, chart.to));
    this.draw();
  }

  // For the devices' names: on a phone a quarter of the width.
  room() {
    return Math.min(190, Math.round((this.canvas?.clientWidth || byId("gantt").clientWidth || 1180) / 4));
  }

  time(event) {
    const box = this.canvas.getBoundingClientRect();
    const part = (event.clientX - box.left - this.gutter) / (box.width - this.gutter);
    return this.low + Math.min(Math.max(part, 0), 1) * (this.high - this.low);
  }

  show(low, high) {
    [this.low, this.high, this.grip] = [low, high, null];
    this.draw();
  }

  zoom(event) {
    const [a, b] = [this.grip, this.time(event)].sort((p, q) => p - q);
    if (this.grip !== null && b - a > (this.high - this.low) / 200) this.show(a, b);
    this.grip = null;
  }

  draw(mark) {
    const rows = this.chart.rows, ratio = devicePixelRatio || 1, width = this.canvas.clientWidth || 1180;
    this.gutter = this.room();
    const height = rows.length * this.row + this.axis;
    this.canvas.width = width * ratio;
    this.canvas.height = height * ratio;
    this.canvas.style.height = height + "px";
    const g = this.canvas.getContext("2d"), plot = width - this.gutter;
    g.scale(ratio, ratio);
    const x = (t) => this.gutter + ((t - this.low) / (this.high - this.low)) * plot;
    const paint = KINDS.map((kind) => css(kind));
    g.textBaseline = "middle";
    rows.forEach((row, index) => {
      const top = index * this.row;
      for (let k = 0, start = 0; k < row.spans.length; k += 3) {
        start += row.spans[k];
        const from = this.chart.from + start * this.chart.unit, to = from + row.spans[k + 1] * this.chart.unit;
        if (to < this.low || from > this.high) continue;
        const a = Math.max(x(from), this.gutter), b = Math.min(x(to), width);
        g.fillStyle = paint[row.spans[k + 2]];
        g.fillRect(a, top + 1, Math.max(b - a, 0.4), this.row - 2);
      }
      g.fillStyle = css("quiet");
      g.font = `${Math.min(this.row, 12)}px system-ui, sans-serif`;
      g.fillText(row.label, 6, top + this.row / 2, this.gutter - 12);
      if (index && rows[index - 1].stage !== row.stage) {
        g.fillStyle = css("quiet");
        g.fillRect(0, top - 0.5, width, 1);
      }
    });
    g.font = "11px system-ui, sans-serif";
    g.fillStyle = css("quiet");
    for (const t of ticks(this.low, this.high, Math.max(2, Math.floor(plot / 120)))) g.fillText(seconds(t), x(t) + 3, height - this.axis / 2);
    if (mark !== undefined && this.grip !== null && this.grip !== undefined) {
      g.fillStyle = css("quiet");
      g.globalAlpha = 0.25;
      g.fillRect(x(Math.min(mark, this.grip)), 0, Math.abs(x(mark) - x(this.grip)), height);
      g.globalAlpha = 1;
    }
  }

  hover(event) {
    const t = this.time(event), box = this.canvas.getBoundingClientRect();
    if (this.grip !== null && this.grip !== undefined) this.draw(t);
    const row = this.chart.rows[Math.floor((event.clientY - box.top) / this.row)];
    if (!row || event.clientX - box.left < this.gutter) return tip(event, row ? row.label : "");
    for (let k = 0, start = 0; k < row.spans.length; k += 3) {
      start += row.spans[k];
      const from = this.chart.from + start * this.chart.unit, length = row.spans[k + 1] * this.chart.unit;
      if (from <= t && t <= from + length)
        return tip(event, `${row.label}: ${data.says[row.spans[k + 2]]}, ${seconds(length)} from ${seconds(from)}`);
    }
    tip(event, `${row.label}: idle at ${seconds(t)}`);
  }
}

// --- who talks to whom, who holds what ---

function drawMap(map) {
  const most = Math.max(1, ...map.bytes.flat());
  const drawn = table(["from \\ to", ...map.labels], map.bytes.map((row, i) => [map.labels[i], ...row.map((bytes) => (bytes ? compact(bytes) : ""))]), { names: 1 });
  map.bytes.forEach((row, i) => row.forEach((bytes, j) => {
    const cell = drawn.tBodies[0].rows[i].cells[j + 1];
    cell.title = `${map.labels[i]} to ${map.labels[j]}: ${compact(bytes, "B")} a step`;
    cell.style.background = `rgba(var(--heat), ${(0.75 * Math.sqrt(bytes / most)).toFixed(3)})`;
  }));
  byId("map").replaceChildren(drawn, element("p", "note", "Bytes a step, all frames, row to column."));
}

function drawLayout(layout) {
  if (!layout.length) return void (byId("layout").textContent = "The coordinators of the swarm decided, at every change.");
  byId("layout").replaceChildren(table(["stage", "layers", "devices", "who"], layout, { words: 3 }));
}

// --- the strategies' figures ---

function drawFigures({ strategy, lines, members }) {
  if (!strategy) return void byId("figures").append(element("p", {}, "No strategy has a pace, so there are no figures."));
  const heads = ["each member in", "members", "GB a month up", "GB a month down", "watts"];
  byId("figures").append(
    element("p", {}, `Figures of ${strategy} at its simulated pace, if no peer leaves.`),
    table([], lines, { names: 1 }), table(heads, members, { names: 1 }));
}

function choose(nav, names, show) {
  const buttons = names.map((name, index) => {
    const button = element("button", { type: "button" }, name);
    button.addEventListener("click", () => pick(index));
    return button;
  });
  const pick = (index) => {
    buttons.forEach((button, i) => button.setAttribute("aria-pressed", String(i === index)));
    show(index);
  };
  nav.replaceChildren(...buttons);
  if (names.length) pick(0);
}

let gantt = null;

function showStrategy(index) {
  const s = data.strategies[index];
  byId("about").textContent = s.about;
  gantt = null;
  if (s.gantt.rows.length) gantt = new Gantt(byId("gantt"), s.gantt);
  else byId("gantt").textContent = "No timeline was recorded.";
  choose(byId("maps"), s.maps.map((map) => map.title), (which) => drawMap(s.maps[which]));
  if (!s.maps.length) byId("map").textContent = "Nothing was sent.";
  drawLayout(s.layout);
}

byId("subtitle").textContent = data.subtitle;
byId("strategies").append(table(data.headings, data.rows, { words: data.headings.length - 1, class: "cards" }));
byId("legend").textContent = data.legend;
byId("window").textContent = data.window;
drawFigures(data.figures);
KINDS.forEach((kind, index) =>
  byId("kinds").append(element("span", {}, element("i", { style: `background:var(--${kind})` }), data.says[index])));
drawThroughput();
choose(byId("tabs"), data.strategies.map((s) => s.name), showStrategy);
let width = innerWidth;
addEventListener("resize", () => {
  if (innerWidth === width) return; // a phone's address bar comes and goes
  width = innerWidth;
  drawThroughput();
  if (gantt) gantt.draw();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => gantt && gantt.draw());
