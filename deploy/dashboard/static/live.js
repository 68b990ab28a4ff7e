// The connection to the serving peer: one WebSocket, reopened while the page is open.

const FIRST_WAIT_MS = 500, LONGEST_WAIT_MS = 8000, SILENCE_MS = 6000;

// onUpdate: called with each message; onLink: with "connecting", "live" or "lost".
export function connect(onUpdate, onLink) {
  const url = new URL("live", document.baseURI);
  url.protocol = url.protocol === "https:" ? "wss:" : "ws:";
  let wait_ms = FIRST_WAIT_MS, retry = 0, silence = 0, socket = null;

  const open = () => {
    clearTimeout(retry);
    const mine = socket = new WebSocket(url);
    // A suspended peer keeps its sockets open but sends nothing.
    const listen = () => { clearTimeout(silence); silence = setTimeout(() => mine.close(), SILENCE_MS); };
    listen();
    mine.onmessage = (event) => {
      wait_ms = FIRST_WAIT_MS;
      listen();
      onLink("live");
      onUpdate(JSON.parse(event.data));
    };
    mine.onclose = () => {
      clearTimeout(silence);
      onLink("lost");
      retry = setTimeout(open, wait_ms);
      wait_ms = Math.min(2 * wait_ms, LONGEST_WAIT_MS);
    };
  };
  const hasten = () => {
    if (document.visibilityState === "visible" && socket.readyState === WebSocket.CLOSED) { wait_ms = FIRST_WAIT_MS; open(); }
  };
  document.addEventListener("visibilitychange", hasten);
  window.addEventListener("online", hasten);
  onLink("connecting");
  open();
}
