// The panels: tiles, this peer's contribution, changes, all peers.

import { ago, byId, compact, duration, element, loss, mark, percent, plural, say } from "./kit.js";

const WORDS = { training: "training", light: "training, state downloading", fetching: "fetching state", paused: "paused", draining: "leaving", silent: "silent", spare: "standing by", unheard: "not heard yet" };
const SIGNS = { plan: "◆", joined: "+", left: "−", turn: "↻", note: "·" };

export function headline(view) {
  say(byId("name"), view.name || "shoal");
  say(byId("subtitle"), [view.elapsed_s && `up ${duration(view.elapsed_s)}`, view.run && `run ${view.run}`].filter(Boolean).join(" · "));
  say(byId("title"), view.title);
  const share = view.steps ? view.step / view.steps : 0;
  document.title = view.step ? `${percent(share)} · ${view.name}` : view.name || "shoal";
  say(byId("phase"), view.phase);
  say(byId("steps"), view.steps ? `step ${view.step.toLocaleString("en")} of ${view.steps.toLocaleString("en")}` : "");
  say(byId("left"), view.standstill || (view.left_s === null ? "" : `${duration(view.left_s)} left`));
  byId("progress").classList.toggle("stands", Boolean(view.standstill));
  say(byId("risks"), view.risks.join(" "));
  byId("risks").hidden = !view.risks.length;
  fill("done", share);
}

export function tiles(view) {
  say(byId("loss"), loss(view.loss));
  say(byId("validation"), view.validation_loss === null ? "not validated yet" : `validation ${loss(view.validation_loss)} at step ${view.validation_step}`);
  say(byId("pace"), view.tokens_per_s === null || !view.step ? "–" : compact(view.tokens_per_s));
  say(byId("stepping"), view.standstill ? view.standstill : view.left_s ? `${((view.steps - view.step) / view.left_s * 60).toFixed(1)} steps a minute` : "");
  const part = view.seen_tokens_per_s && view.foreseen_tokens_per_s ? view.seen_tokens_per_s / view.foreseen_tokens_per_s : 0;
  say(byId("foreseen"), part ? `${Math.round(100 * part)} % of ${compact(view.foreseen_tokens_per_s)} predicted` : view.foreseen_tokens_per_s ? `${compact(view.foreseen_tokens_per_s)} predicted` : "");
  mark(byId("foreseen"), "title", view.foreseen);
  say(byId("stale"), view.step ? view.staleness_steps_mean.toFixed(2) : "–");
  say(byId("era"), view.rollbacks ? `went back to a snapshot ${plural(view.rollbacks, "time")}` : "behind the newest weights");
  say(byId("count"), String(view.peers.length));
  const counts = {};
  for (const peer of view.peers) counts[peer.state] = (counts[peer.state] ?? 0) + 1;
  say(byId("states"), Object.keys(WORDS).filter((state) => counts[state]).map((state) => `${counts[state]} ${WORDS[state]}`).join(", "));
  say(byId("coordinator"), view.coordinator_name || "–");
  say(byId("term"), view.term ? `term ${view.term}, plan ${view.sequence}` : "");
}

let whose = "";

// Only peers with a report of their own can be chosen.
export function choosePeer(id) {
  const select = byId("whose");
  if (![...select.options].some((option) => option.value === id)) return;
  select.value = id;
  select.onchange();
}

export function contribution(view) {
  const all = [view.mine, ...view.others].filter(Boolean);
  byId("mine").hidden = !all.length;
  document.body.classList.toggle("alone", !all.length);
  if (!all.length) return;
  choose(all, view.mine);
  const mine = all.find((each) => each.peer === whose) ?? all[0];
  say(byId("mine-title"), mine === view.mine ? "This peer" : "A peer");
  const limit = byId("limit");
  mark(limit, "data-kind", mine.limited_by.kind);
  say(limit, mine.limited_by.text);
  for (const [id, value] of [["busy", mine.busy], ["sending", mine.sending], ["work", mine.work_share]]) {
    fill(id, value);
    say(byId(`${id}-text`), percent(value));
  }
  rows(byId("gives"), [
    ["computes", compact(mine.flop_per_s, "FLOP/s"), compact(mine.flop_total, "FLOP")],
    ["tokens", `${compact(mine.tokens_per_s)}/s`, compact(mine.tokens_total)],
    ["sends", compact(mine.sent_bytes_per_s, "B/s"), compact(mine.sent_bytes_total, "B")],
    ["receives", compact(mine.received_bytes_per_s, "B/s"), compact(mine.received_bytes_total, "B")],
  ]);
  say(byId("here"), `${compact(mine.microbatches_total)} microbatches in ${duration(mine.uptime_s)}, with ${compact(mine.memory_bytes, "B")} of memory`);
  const caps = mine.limits?.caps ?? [];
  const wanted = caps.join("\n");
  if (byId("caps").dataset.caps !== wanted) {
    byId("caps").dataset.caps = wanted;
    byId("caps").replaceChildren(...caps.map((cap) => element("span", "", cap)));
  }
}

function choose(all, mine) {
  const select = byId("whose");
  select.hidden = all.length < 2;
  const wanted = all.map((each) => each.peer + each.name).join();
  if (select.dataset.all !== wanted) {
    select.dataset.all = wanted;
    select.replaceChildren(...all.map((each) => {
      const option = element("option", "", each.name + (each === mine ? " (this peer)" : ""));
      option.value = each.peer;
      return option;
    }));
    select.value = all.some((each) => each.peer === whose) ? whose : all[0].peer;
    select.onchange = () => { whose = select.value; contribution.again?.(); };
  }
  whose = select.value;
}

function rows(body, wanted) {
  if (!body.children.length) {
    body.append(...wanted.map((cells) => {
      const row = element("tr");
      row.append(...cells.map((cell, index) => element(index ? "td" : "th", "", cell)));
      return row;
    }));
  }
  wanted.forEach((cells, index) => cells.forEach((cell, column) => say(body.children[index].children[column], cell)));
}

export function history(view) {
  const list = byId("changes");
  const wanted = JSON.stringify(view.changes);
  if (list.dataset.shown !== wanted) {
    list.dataset.shown = wanted;
    list.replaceChildren(...view.changes.map((change) => {
      const kind = kindOf(change), line = element("li", kind);
      const about = change.kind === "plan" ? `plan ${change.sequence} · term ${change.term} · by ${change.coordinator}` : "";
      line.append(element("i", "", SIGNS[kind]), element("span", "", change.text || "a plan"), element("small", "", about), element("time"));
      if (change.outcome) line.title = change.outcome;
      return line;
    }));
  }
  view.changes.forEach((change, index) => say(list.children[index].lastChild, ago(view.now_s - change.at_s)));
  if (!view.changes.length && !list.children.length) list.append(element("li", "quiet", "nothing yet"));
}

// The kind of a plan, for its colour.
function kindOf(change) {
  if (change.kind !== "plan") return change.kind;
  if (change.text.includes("hand-over from")) return "turn";
  const [came, went] = [change.text.includes(" joined"), change.text.includes(" left")];
  return came === went ? "plan" : came ? "joined" : "left";
}

const stateOf = (peer) => {
  if (peer.state === "silent") return `silent for ${duration(peer.seen_s_ago)}`;
  if (peer.state === "light" && peer.light) return `training, ${peer.light[0]}/${peer.light[1]} layers of state here${peer.fetch && ", "}${peer.fetch}`;
  if (peer.state === "fetching" && peer.fetch) return peer.fetch;
  return peer.state === "paused" && peer.paused_s !== null ? `paused for ${duration(peer.paused_s)}` : WORDS[peer.state];
};

const COLUMNS = [
  ["name", "peer", (peer) => peer.name + (peer.is_coordinator ? " ★" : ""), (peer) => peer.name],
  ["stage", "stage", (peer) => (peer.stage === null ? "–" : String(peer.stage)), (peer) => peer.stage ?? 1e9],
  ["state", "state", (peer) => stateOf(peer), (peer) => peer.state],
  ["version", "version", (peer) => (peer.version >= 0 ? String(peer.version) : ""), (peer) => peer.version],
  ["forward", "forward", (peer) => (peer.forward_s ? `${(1000 * peer.forward_s).toFixed(1)} ms` : ""), (peer) => peer.forward_s],
  ["share", "share", (peer) => (peer.share ? percent(peer.share) : ""), (peer) => peer.share],
  ["speed", "speed", (peer) => (peer.flop_per_s ? compact(peer.flop_per_s, "FLOP/s") : ""), (peer) => peer.flop_per_s],
  ["device", "device", (peer) => peer.device, (peer) => peer.device],
];

export class Everyone {
  constructor() {
    this.sort = 1;
    this.up = true;
    this.rows = new Map();
    this.body = document.querySelector("#everyone tbody");
    const head = document.querySelector("#everyone thead tr");
    COLUMNS.forEach(([id, title], index) => {
      const cell = element("th", id), button = element("button", "", title);
      button.type = "button";
      button.onclick = () => {
        this.up = this.sort === index ? !this.up : true;
        this.sort = index;
        this.draw(this.view);
      };
      cell.append(button);
      head.append(cell);
    });
    byId("filter").addEventListener("input", () => this.draw(this.view));
  }

  draw(view) {
    if (!view) return;
    this.view = view;
    byId("filter").hidden = view.peers.length < 12;
    const wanted = byId("filter").value.trim().toLowerCase();
    const matches = (peer) => !wanted || COLUMNS.some(([, , show]) => show(peer).toLowerCase().includes(wanted));
    const key = COLUMNS[this.sort][3];
    const shown = view.peers.filter(matches).sort((a, b) => (this.up ? 1 : -1) * compare(key(a), key(b)) || compare(a.name, b.name));
    const before = new Map(this.rows);
    shown.forEach((peer, index) => {
      let row = this.rows.get(peer.id);
      if (!row) {
        row = element("tr");
        row.append(...COLUMNS.map(([id]) => element("td", id)));
        this.rows.set(peer.id, row);
      }
      before.delete(peer.id);
      mark(row, "class", `${peer.state}${peer.is_me ? " me" : ""}`);
      COLUMNS.forEach(([, , show], column) => say(row.children[column], show(peer)));
      if (this.body.children[index] !== row) this.body.insertBefore(row, this.body.children[index] ?? null);
    });
    for (const [id, row] of before) {
      row.remove();
      this.rows.delete(id);
    }
  }
}

const compare = (a, b) => (typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b);

function fill(id, share) {
  byId(id).style.width = `${Math.round(1000 * Math.min(1, Math.max(0, share))) / 10}%`;
}
