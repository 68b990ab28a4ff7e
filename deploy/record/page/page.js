// Shows a recorded run: its figures as text and tables, its history as plots.

const data = JSON.parse(byId("data").textContent);
const CHANGES_MAX = 200;
const ENDING = /\b[1-9A-HJ-NP-Za-km-z]{8}\b/g; // a peer's name in the reason of a plan
const { start, validation } = data;

const whole = (number) => Math.round(number).toLocaleString("en");
const date = (at_s) => new Date(at_s * 1000).toLocaleString("sv-SE", { dateStyle: "short", timeStyle: "short" });
const named = (text) => text.replace(ENDING, (ending) => data.names[ending] ?? ending);

// 45 s, 12 min 5 s, 3 h 10 min, 2 d 4 h
function span(seconds) {
  for (const [unit, name, smaller, less] of [[86400, "d", 3600, "h"], [3600, "h", 60, "min"], [60, "min", 1, "s"]])
    if (seconds >= unit) return `${Math.floor(seconds / unit)} ${name} ${Math.floor((seconds % unit) / smaller)} ${less}`;
  return `${seconds.toFixed(0)} s`;
}

// 9,812, 35.1 k, 3.3 M
function amount(number) {
  for (const [unit, name] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]])
    if (number >= unit && number >= 1e4) return `${(number / unit).toFixed(1)} ${name}`;
  return whole(number);
}

function subtitle() {
  if (!data.times_s) return "Nothing was recorded yet.";
  const model = start ? `${amount(start.num_parameters)} parameters in ${start.num_layers} layers; ` : "";
  return `${model}${data.times_s.map(date).join(" to ")}; run ${data.run || "without a name"}`;
}

function tiles() {
  const made = [["Steps", whole(data.step), data.steps ? `of ${whole(data.steps)}` : ""]];
  if (data.loss) made.push(["Loss", data.loss[1].toFixed(3), `${data.loss[0].toFixed(3)} at first`]);
  if (validation) {
    const [, last, best] = validation;
    made.push(["Validation", last.loss.toFixed(3), `at step ${whole(last.step)}; best ${best.loss.toFixed(3)}`]);
  }
  made.push(["Tokens", amount(data.tokens), data.tokens_per_s ? `${whole(data.tokens_per_s)} a second` : ""]);
  made.push(["Time", span(data.elapsed_s), "from the first step to the last"]);
  return made.map(([name, figure, more]) => element("article", {},
    element("h2", {}, name), element("p", {}, element("b", "word", figure)), element("p", "quiet", more)));
}

// Plans in which peers came, went or moved, without mere transfers of the coordinator's role.
const plans = data.plans
  .filter(({ reason }) => !reason.includes("hand-over from") && !reason.includes("is under way"))
  .map(({ time, reason }) => ({ at_s: time, kind: "plan", text: named(reason) }));

function changes() {
  const told = data.starts.slice(1).map((line) => ({ at_s: line.time, kind: "note", text: `the record goes on, kept by ${line.peer_name}` }));
  const shown = [...plans, ...told].sort((a, b) => a.at_s - b.at_s).slice(-CHANGES_MAX);
  if (!shown.length) return [element("li", "quiet", "Nothing.")];
  return shown.map(({ at_s, kind, text }) => element("li", kind, element("time", {}, date(at_s)), ` ${text}`));
}

function peers() {
  const rows = data.shares.map(({ lines, work_s, tokens }) => {
    const stages = [...new Set(lines.map((line) => line.stage ?? null))].filter((stage) => stage !== null).sort((a, b) => a - b);
    const device = lines.map((line) => line.device).find(Boolean) ?? "";
    return [lines.at(-1).name, device, stages.join(", ") || "standing by", date(lines[0].time), span(work_s), amount(tokens)];
  });
  const made = table(["peer", "device", "stages", "came", "at work for", "tokens meanwhile"], rows);
  made.querySelectorAll("tbody tr").forEach((row, index) => { row.title = data.shares[index].lines[0].peer; });
  return made;
}

function facts() {
  const [gap_s, before] = data.standstill;
  const rows = [
    ["steps", whole(data.step) + (data.steps ? ` of ${whole(data.steps)}` : "")],
    ["tokens trained on", whole(data.tokens)],
    ["from the first step to the last", span(data.elapsed_s)],
    ["longest standstill", before ? `${span(gap_s)}, after step ${whole(before)}` : "none"],
    ["tokens a second", data.tokens_per_s ? `${whole(data.tokens_per_s)} in the median` : "not known"],
    ["peers at work at once", `${data.peers_max} at most`],
    ["lost", data.lost],
    ["coordinators", new Set(data.plans.map((plan) => plan.coordinator)).size],
  ];
  if (validation) {
    const [first, last, best] = validation.map((line) => `${line.loss.toFixed(4)} at step ${whole(line.step)}`);
    rows.push(["validation", `${first}, ${last}, best ${best}`]);
  }
  if (start) {
    rows.push(["parameters", whole(start.num_parameters)], ["optimizer", start.optimizer], ...Object.entries(start.fields ?? {}));
    rows.push(["shoal", start.version], ["record kept by", `${start.peer_name} (${start.peer})`]);
  }
  return table([], rows, { names: 1 });
}

byId("subtitle").textContent = subtitle();
byId("tiles").append(...tiles());
byId("changes").append(...changes());
byId("peers").append(peers());
byId("facts").append(facts());

const charts = new Charts();
charts.name = data.name || document.title;
charts.take({ generation: 0, first: 0, points: data.points, validations: data.validations }, plans);
charts.draw();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => charts.draw());
