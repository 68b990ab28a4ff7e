// The swarm as a picture: stages in a row, replicas stacked, links by traffic. In a small swarm every peer is a card and
// every link a line; in a large one peers are dots in their stage's box. On a narrow screen stages go downwards.
//
// The drawing is rebuilt only when a peer comes, goes or moves; otherwise attributes change in place.

import { byId, compact, duration, element, mark, percent, say, svg } from "./kit.js";

const CARDS_MAX = 48, STACK_MAX = 9;
const CARD = { height: 50, gap: 12 }, ROOMY = { height: 74, gap: 54 }, HEAD = 44, MARGIN = 6;
const COLUMN_MIN = 140, COLUMN_ROOMY = 190, STACK_ROOMY = 3;
const DOT = 21, DOT_RADIUS = 7.5, DOT_PITCH_ROOMY = 25, ROWS_ROOMY = 10;
const WORDS = { training: "training", light: "training, state downloading", fetching: "fetching state", paused: "paused", draining: "leaving", silent: "silent", spare: "standing by", unheard: "not heard yet" };

export class Picture {
  constructor() {
    this.root = byId("picture");
    this.tip = byId("tip");
    this.shape = "";
    this.nodes = new Map();
    this.lines = new Map();
    this.cells = new Map();
    this.view = null;
    this.onChoose = () => {};
    new ResizeObserver(() => this.view && this.draw(this.view)).observe(this.root);
    this.root.addEventListener("pointerover", (event) => this.point(event));
    this.root.addEventListener("pointerleave", () => this.showTip(null));
    this.root.addEventListener("click", (event) => {
      this.point(event);
      if (this.pointed) this.onChoose(this.pointed);
    });
  }

  draw(view) {
    this.view = view;
    const width = Math.floor(this.root.clientWidth);
    if (!width || !view.stages.length) return;
    const groups = view.stages.map((_, stage) => view.peers.filter((peer) => peer.stage === stage).sort(byName));
    const spares = view.peers.filter((peer) => peer.stage === null).sort(byName);
    const small = view.peers.length <= CARDS_MAX && Math.max(...groups.map((group) => group.length)) <= STACK_MAX;
    const gone = small ? view.gone : [];
    const shape = JSON.stringify([width, small, view.stages, groups.map(ids), ids(spares), ids(gone), view.links.map((l) => l[0] + l[1]), view.experts.map(expertKey)]);
    if (shape !== this.shape) {
      this.shape = shape;
      this.build(view, groups, spares, gone, width, small);
    }
    this.update(view);
  }

  build(view, groups, spares, gone, width, small) {
    const known = new Set(this.nodes.keys());
    this.nodes.clear();
    this.lines.clear();
    this.cells.clear();
    const drawing = svg("svg", { width, role: "img" });
    this.behind = svg("g");
    this.front = svg("g");
    drawing.append(this.behind, this.front);
    const stacks = groups.map((group, stage) => [...group, ...gone.filter((peer) => peer.stage === stage)]);
    const height = small ? this.cards(view, stacks, spares, width) : this.dots(view, groups, spares, width);
    mark(drawing, "height", height);
    mark(drawing, "viewBox", `0 0 ${width} ${height}`);
    if (known.size) for (const [id, node] of this.nodes) if (!known.has(id)) node.group.classList.add("arrives");
    for (const link of small ? view.links : []) this.line(link);
    this.root.replaceChildren(drawing);
    this.drawing = drawing;
  }

  // --- cards ---

  cards(view, stacks, spares, width) {
    const column = width / stacks.length;
    if (column < COLUMN_MIN) return this.cardsDown(view, stacks, spares, width);
    const gap = Math.min(96, Math.max(22, column * 0.3)), card = Math.min(190, column - gap);
    const tallest = Math.max(1, ...stacks.map((stack) => stack.length));
    const size = column >= COLUMN_ROOMY && tallest <= STACK_ROOMY ? ROOMY : CARD, each = size.height + size.gap;
    const room = tallest * each - size.gap;
    stacks.forEach((stack, stage) => {
      const x = column * stage + (column - card) / 2;
      this.head(view, stage, x + card / 2, 16, "middle");
      const top = HEAD + (room - (stack.length * each - size.gap)) / 2;
      stack.forEach((peer, row) => this.card(peer, x, top + row * each, card, "across", size.height));
    });
    const below = this.experts(view, HEAD + room + 14, (stage) => [column * stage + (column - card) / 2, card]);
    return this.spareCards(spares, below, width);
  }

  cardsDown(view, stacks, spares, width) {
    const per = Math.max(1, Math.min(Math.max(...stacks.map((stack) => stack.length)), Math.floor((width + CARD.gap) / 124)));
    const card = (width - 2 * MARGIN - (per - 1) * CARD.gap) / per, each = CARD.height + CARD.gap;
    let y = 4;
    stacks.forEach((stack, stage) => {
      this.head(view, stage, MARGIN, y + 12, "start");
      y += 24;
      stack.forEach((peer, index) => this.card(peer, MARGIN + (index % per) * (card + CARD.gap), y + Math.floor(index / per) * each, card, "down", CARD.height));
      y += Math.max(1, Math.ceil(stack.length / per)) * each + 14;
      y = this.expertRow(view, stage, MARGIN, y - 22, width - 2 * MARGIN, y - 8) + 8;
    });
    return this.spareCards(spares, y, width);
  }

  spareCards(spares, y, width) {
    if (!spares.length) return y + 2;
    this.front.append(svg("text", { x: MARGIN, y: y + 14, class: "head" }, "standing by"));
    const per = Math.max(1, Math.floor((width + CARD.gap) / 150)), each = CARD.height + CARD.gap;
    const card = Math.min(190, (width - 2 * MARGIN - (per - 1) * CARD.gap) / per);
    spares.forEach((peer, index) => this.card(peer, MARGIN + (index % per) * (card + CARD.gap), y + 26 + Math.floor(index / per) * each, card, "across", CARD.height));
    return y + 26 + Math.ceil(spares.length / per) * each;
  }

  card(peer, x, y, width, flow, height) {
    const group = svg("g", { class: "peer", "data-peer": peer.id });
    const room = width - 34;
    const star = svg("text", { x: x + width - 16, y: y + 21, class: "star" }, "★");
    const name = svg("text", { x: x + 22, y: y + 21, class: "name" }, cut(peer.name, room - 10, 7.2));
    const about = svg("text", { x: x + 22, y: y + 37, class: "about" });
    const share = svg("rect", { x: x + 10, y: y + height - 6, height: 2.5, rx: 1.25, class: "share" });
    group.append(svg("rect", { x, y, width, height, rx: 10, class: "box" }), svg("circle", { cx: x + 12, cy: y + 17, r: 4, class: "state" }), name, about, share, star);
    if (height >= ROOMY.height && peer.device) group.append(svg("text", { x: x + 22, y: y + 53, class: "about" }, cut(peer.device.replace(/^NVIDIA (GeForce )?/, ""), room + 12, 6.1)));
    this.front.append(group);
    this.nodes.set(peer.id, { group, about, share, star, room, width, x, y, stage: peer.stage, height, flow, gone: "ago_s" in peer });
  }

  // --- links ---

  line([a, b]) {
    const one = this.nodes.get(a), two = this.nodes.get(b);
    if (!one || !two) return;
    const path = svg("path", { d: this.route(one, two), class: "link" });
    path.append(svg("title"));
    this.behind.append(path);
    this.lines.set(a + b, { path, title: path.firstChild });
  }

  route(one, two) {
    if (one.stage !== null && two.stage !== null && one.stage > two.stage) [one, two] = [two, one];
    if (one.flow === "across" && one.stage !== two.stage) {
      const [x1, y1, x2, y2] = [one.x + one.width, one.y + one.height / 2, two.x, two.y + two.height / 2], bend = (x2 - x1) * 0.5;
      return `M${x1} ${y1}C${x1 + bend} ${y1} ${x2 - bend} ${y2} ${x2} ${y2}`;
    }
    if (one.flow === "across") {
      const [high, low] = one.y < two.y ? [one, two] : [two, one];
      if (low.y - high.y < 2 * high.height) return `M${high.x + high.width / 2} ${high.y + high.height}V${low.y}`;
      const x = high.x, [y1, y2] = [high.y + high.height * 0.6, low.y + low.height * 0.4];
      return `M${x} ${y1}C${x - 12} ${y1} ${x - 12} ${y2} ${x} ${y2}`;
    }
    const [x1, y1, x2, y2] = [one.x + one.width / 2, one.y + one.height, two.x + two.width / 2, two.y];
    if (one.stage === two.stage) return `M${x1} ${one.y + one.height / 2}L${x2} ${two.y + two.height / 2}`;
    const bend = Math.max(10, (y2 - y1) * 0.5);
    return `M${x1} ${y1}C${x1} ${y1 + bend} ${x2} ${y2 - bend} ${x2} ${y2}`;
  }

  // --- dots ---

  dots(view, groups, spares, width) {
    const column = width / groups.length;
    return column >= 62 ? this.dotsAcross(view, groups, spares, width, column) : this.dotsDown(view, groups, spares, width);
  }

  dotsAcross(view, groups, spares, width, column) {
    const gap = Math.min(30, Math.max(12, column * 0.16)), box = column - gap;
    const per = Math.max(1, Math.floor((box - 10) / DOT));
    const rows = Math.max(...groups.map((group) => Math.ceil(group.length / per)));
    const pitch = rows <= ROWS_ROOMY ? DOT_PITCH_ROOMY : DOT, height = rows * pitch + 12;
    groups.forEach((group, stage) => {
      const x = column * stage + gap / 2;
      this.head(view, stage, x + box / 2, 16, "middle", column < 84);
      this.behind.append(svg("rect", { x, y: HEAD, width: box, height, rx: 10, class: "stage" }));
      if (stage) this.behind.append(svg("path", { d: arrow(x - gap, HEAD + height / 2, gap), class: "flow" }));
      group.forEach((peer, index) => this.dot(peer, x + (box - per * DOT) / 2 + DOT * (index % per + 0.5), HEAD + 6 + pitch * (Math.floor(index / per) + 0.5)));
    });
    const below = this.experts(view, HEAD + height + 12, (stage) => [column * stage + gap / 2, box]);
    return this.spareDots(spares, below, width);
  }

  dotsDown(view, groups, spares, width) {
    const label = 80, per = Math.max(1, Math.floor((width - label - 12) / DOT));
    let y = 2;
    groups.forEach((group, stage) => {
      const height = Math.max(1, Math.ceil(group.length / per)) * DOT + 10;
      this.front.append(svg("text", { x: 2, y: y + height / 2 - 2, class: "head" }, `stage ${stage}`), svg("text", { x: 2, y: y + height / 2 + 12, class: "about" }, layers(view.stages[stage])));
      this.behind.append(svg("rect", { x: label, y, width: width - label - 1, height, rx: 10, class: "stage" }));
      group.forEach((peer, index) => this.dot(peer, label + 6 + DOT * (index % per + 0.5), y + 5 + DOT * (Math.floor(index / per) + 0.5)));
      y = this.expertRow(view, stage, label, y + height + 4, width - label, y + height) + 9;
    });
    return this.spareDots(spares, y, width);
  }

  spareDots(spares, y, width) {
    if (!spares.length) return y + 2;
    const label = 84, per = Math.max(1, Math.floor((width - label) / DOT));
    this.front.append(svg("text", { x: 2, y: y + DOT / 2 + 4, class: "head" }, "standing by"));
    spares.forEach((peer, index) => this.dot(peer, label + DOT * (index % per + 0.5), y + DOT * (Math.floor(index / per) + 0.5)));
    return y + Math.ceil(spares.length / per) * DOT + 4;
  }

  dot(peer, x, y) {
    const group = svg("g", { class: "peer", "data-peer": peer.id });
    const star = svg("text", { x, y: y + 4.5, class: "star dot", "text-anchor": "middle" }, "★");
    group.append(svg("circle", { cx: x, cy: y, r: DOT / 2, class: "reach" }), svg("circle", { cx: x, cy: y, r: DOT_RADIUS, class: "state" }), star);
    this.front.append(group);
    this.nodes.set(peer.id, { group, star, gone: false });
  }

  // --- both ---

  head(view, stage, x, y, anchor, narrow = false) {
    const text = svg("text", { x, y, class: "head", "text-anchor": anchor }, narrow && stage ? String(stage) : `stage ${stage}`);
    if (anchor === "start") {
      const more = svg("tspan", { class: "about", dx: 8 }, layers(view.stages[stage]));
      text.append(more);
      this.front.append(text);
    } else {
      this.front.append(text, svg("text", { x, y: y + 15, class: "about", "text-anchor": anchor }, narrow && stage ? layers(view.stages[stage]).replace(/^layers? /, "") : layers(view.stages[stage])));
    }
  }

  experts(view, y, place) {
    if (!view.experts.length) return y;
    return Math.max(...view.stages.map((_, stage) => this.expertRow(view, stage, place(stage)[0], y, place(stage)[1], y)));
  }

  expertRow(view, stage, x, y, width, otherwise) {
    const experts = view.experts.filter((expert) => expert.stage === stage);
    if (!experts.length) return otherwise;
    const size = 16, per = Math.max(1, Math.floor(width / size));
    experts.forEach((expert, index) => {
      const left = x + size * (index % per), top = y + 12 + size * Math.floor(index / per), side = size - 2;
      const group = svg("g", { class: "expert" }), title = svg("title"), box = svg("rect", { x: left, y: top, width: side, height: side, rx: 3 });
      const copies = svg("text", { x: left + side / 2, y: top + side - 3, "text-anchor": "middle" });
      group.append(title, box, copies);
      this.front.append(group);
      this.cells.set(expertKey(expert), { title, box, copies });
    });
    this.front.append(svg("text", { x, y: y + 6, class: "about" }, `${experts.length} experts`));
    return y + 18 + size * Math.ceil(experts.length / per);
  }

  update(view) {
    const everyone = new Map(view.peers.map((peer) => [peer.id, peer]));
    for (const [id, node] of this.nodes) {
      const peer = everyone.get(id);
      const state = peer ? peer.state : "gone";
      mark(node.group, "class", `peer ${state}${peer?.is_me ? " me" : ""}${peer?.is_coordinator ? " lead" : ""}${peer?.is_new ? " new" : ""}${node.group.classList.contains("arrives") ? " arrives" : ""}`);
      if (!node.about) continue;
      say(node.about, peer ? cut(`${peer.is_me ? "you · " : ""}${about(peer)}`, node.room + 14, 6.1) : "left");
      mark(node.share, "width", peer ? Math.max(0, (node.width - 20) * peer.share).toFixed(1) : 0);
    }
    const most = Math.max(1, ...view.links.map((link) => link[2]));
    for (const [a, b, rate, measured] of view.links) {
      const line = this.lines.get(a + b);
      if (!line) continue;
      mark(line.path, "stroke-width", (1 + 6 * Math.sqrt(rate / most)).toFixed(1));
      mark(line.path, "class", measured ? "link measured" : "link");
      say(line.title, `${nameOf(everyone, a)} ↔ ${nameOf(everyone, b)}: ${compact(rate, "B/s")}${measured ? ", measured" : ", by the plan's shares"}`);
    }
    for (const expert of view.experts) {
      const cell = this.cells.get(expertKey(expert));
      if (!cell) continue;
      mark(cell.box, "fill-opacity", Math.min(1, 0.12 + 0.4 * (expert.load ?? 1)).toFixed(2));
      say(cell.copies, String(expert.replicas));
      say(cell.title, aboutExpert(expert, view.peers));
    }
    const shown = view.peers.filter((peer) => isAtWork(peer)).length;
    mark(this.drawing, "aria-label", `${view.peers.length} peers on ${view.stages.length} stages, ${shown} training`);
    say(byId("flow"), view.flows.length && view.tokens_per_s ? `≈ ${compact(Math.max(...view.flows), "B/s")} between stages` : "");
    if (this.pointed) this.showTip(this.pointed);
  }

  point(event) {
    const group = event.target.closest("[data-peer]");
    this.showTip(group ? group.dataset.peer : null);
  }

  showTip(id) {
    const peer = id && this.view.peers.find((each) => each.id === id), node = peer && this.nodes.get(id);
    this.pointed = node ? id : null;
    this.tip.hidden = !node;
    if (!node) return;
    const lines = [
      [peer.name + (peer.is_coordinator ? " ★" : "") + (peer.is_me ? " (this peer)" : ""), "b"],
      [peer.device, "span"],
      [peer.stage === null ? "standing by" : `stage ${peer.stage} · ${WORDS[peer.state]}`, "span"],
      [[peer.version >= 0 ? `version ${peer.version}` : "", peer.forward_s ? `forward ${(1000 * peer.forward_s).toFixed(1)} ms` : ""].filter(Boolean).join(" · "), "span"],
      [[peer.share ? `${percent(peer.share)} of its stage` : "", peer.flop_per_s ? compact(peer.flop_per_s, "FLOP/s") : ""].filter(Boolean).join(" · "), "span"],
      [`heard ${peer.seen_s_ago.toFixed(1)} s ago`, "span"],
    ].filter(([text]) => text);
    this.tip.replaceChildren(...lines.map(([text, tag]) => element(tag, "", text)));
    const from = node.group.getBoundingClientRect(), within = this.tip.parentElement.getBoundingClientRect();
    const left = Math.min(Math.max(8, from.left - within.left + from.width / 2 - this.tip.offsetWidth / 2), within.width - this.tip.offsetWidth - 8);
    const above = from.top - within.top - this.tip.offsetHeight - 8;
    this.tip.style.left = `${left}px`;
    this.tip.style.top = `${above > 4 ? above : from.bottom - within.top + 8}px`;
  }
}

const byName = (a, b) => a.name.localeCompare(b.name, "en", { numeric: true }) || (a.id < b.id ? -1 : 1);
const isAtWork = (peer) => peer.state === "training" || peer.state === "light";
const ids = (peers) => peers.map((peer) => peer.id);
const layers = ([first, last]) => (last - first === 1 ? `layer ${first}` : `layers ${first}–${last - 1}`);
const nameOf = (everyone, id) => everyone.get(id)?.name ?? id.slice(-8);
const cut = (text, room, per) => (text.length * per <= room ? text : `${text.slice(0, Math.max(1, Math.floor(room / per) - 1))}…`);
const arrow = (x, y, gap) => `M${x + 3} ${y}h${gap - 9}m-4 -4l5 4l-5 4`;

const expertKey = (expert) => `${expert.stage}.${expert.expert}`;

function aboutExpert(expert, peers) {
  const load = expert.load === null ? "" : `${expert.load.toFixed(2)} times the usual load, `;
  const names = (positions) => positions.map((at) => peers[at]?.name).filter(Boolean).join(", ");
  const coming = expert.coming.length ? `; fetched by ${names(expert.coming)}` : "";
  return `expert ${expert.expert}: ${load}held by ${names(expert.holders) || "nobody"}${coming}`;
}

function about(peer) {
  if (peer.state === "silent") return `silent for ${duration(peer.seen_s_ago)}`;
  if (peer.state === "paused" && peer.paused_s !== null) return `paused for ${duration(peer.paused_s)}`;
  if (!isAtWork(peer)) return WORDS[peer.state];
  return `v${peer.version}${peer.forward_s ? ` · ${(1000 * peer.forward_s).toFixed(1)} ms` : ""}`;
}
