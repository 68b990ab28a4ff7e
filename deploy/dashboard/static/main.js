// The page: one update a second, drawn while it is visible.

import { Charts } from "./charts.js";
import { byId, say } from "./kit.js";
import { connect } from "./live.js";
import { choosePeer, contribution, Everyone, headline, history, tiles } from "./panels.js";
import { Picture } from "./picture.js";
import { steering } from "./steering.js";

const charts = new Charts(), picture = new Picture(), everyone = new Everyone();
const LINKS = { connecting: "connecting", live: "live", lost: "lost, looking for it" };
const ROWS_EVERY_UPDATE = 40;
let view = null, steers = false, updates = 0;

function draw() {
  if (view === null || document.visibilityState === "hidden") return;
  headline(view);
  tiles(view);
  picture.draw(view);
  contribution(view);
  steering(view, steers);
  charts.draw();
  history(view);
  // Two hundred rows are half of the page's cost, so they may be a few seconds old.
  if (view.peers.length < ROWS_EVERY_UPDATE || updates % 4 === 0 || everyone.view === undefined) everyone.draw(view);
}

contribution.again = draw;
picture.onChoose = choosePeer;

byId("theme").addEventListener("click", () => {
  window.nextTheme();
  theme();
  draw();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
document.addEventListener("visibilitychange", draw);

function theme() {
  say(byId("theme").firstElementChild, document.documentElement.dataset.theme);
}

theme();
connect((update) => {
  view = update.view;
  steers = update.steers;
  updates += 1;
  charts.name = view.name;
  charts.take(update.curves, view.changes);
  draw();
}, (link) => {
  document.body.dataset.link = link;
  say(byId("link").querySelector("b"), LINKS[link]);
});
