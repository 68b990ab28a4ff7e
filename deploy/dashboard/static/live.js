// The connection to the serving peer: one stream of events, reopened while the page is open.

const FIRST_WAIT_MS = 500, LONGEST_WAIT_MS = 8000, SILENCE_MS = 6000;

// onUpdate: called with each message; onLink: with "connecting", "live" or "lost".
export function connect(onUpdate, onLink) {
  let wait_ms = FIRST_WAIT_MS, retry = 0, silence = 0, source = null;

  const open = () => {
    clearTimeout(retry);
    source = new EventSource(new URL("live", document.baseURI));
    listen();
    source.onmessage = (event) => {
      wait_ms = FIRST_WAIT_MS;
      listen();
      onLink("live");
      onUpdate(JSON.parse(event.data));
    };
    source.onerror = lose; // the browser's own waits are longer, and end after a refusal
  };
  const lose = () => {
    clearTimeout(silence);
    source.close();
    onLink("lost");
    retry = setTimeout(open, wait_ms);
    wait_ms = Math.min(2 * wait_ms, LONGEST_WAIT_MS);
  };
  // A suspended peer keeps its sockets open but sends nothing.
  const listen = () => { clearTimeout(silence); silence = setTimeout(lose, SILENCE_MS); };
  const hasten = () => {
    if (document.visibilityState === "visible" && source.readyState === EventSource.CLOSED) { wait_ms = FIRST_WAIT_MS; open(); }
  };
  document.addEventListener("visibilitychange", hasten);
  window.addEventListener("online", hasten);
  onLink("connecting");
  open();
}
