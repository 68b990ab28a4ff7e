// Pauses this peer, with the key that the peer has printed after the # of the page's address.

import { byId, say } from "./kit.js";

const KEPT = "shoal-key";

// Remove the key from the address bar at once: addresses get copied, and screenshots show them.
const given = location.hash.slice(1);
if (given) {
  sessionStorage.setItem(KEPT, given);
  history.replaceState(null, "", location.pathname + location.search);
}
const key = given || sessionStorage.getItem(KEPT);
let asked = null;

export function steering(view, steers) {
  const button = byId("pause"), mine = view.mine;
  button.hidden = !(key && steers && mine);
  if (button.hidden) return;
  const paused = mine.limits?.paused ?? false;
  if (asked === paused) asked = null;
  button.disabled = asked !== null;
  button.setAttribute("aria-pressed", String(paused));
  say(button, paused ? "Resume" : "Pause");
  button.onclick = () => ask(!paused);
}

async function ask(pause) {
  const button = byId("pause"), refused = byId("refused");
  asked = pause;
  button.disabled = true;
  let answer = "";
  try {
    const reply = await fetch(pause ? "pause" : "resume", { method: "POST", headers: { "X-Shoal-Key": key } });
    const now = reply.ok ? await reply.json() : null;
    answer = now === null ? await reply.text() : now.paused !== pause ? now.reasons.join("; ") : "";
  } catch {
    answer = "the peer does not answer";
  }
  if (answer) asked = null;
  button.disabled = asked !== null;
  refused.hidden = !answer;
  say(refused, answer);
}
