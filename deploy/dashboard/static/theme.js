// Loaded in the head without defer, so that a dark page never flashes white.
(() => {
  const THEMES = ["auto", "light", "dark"];
  const stored = () => { try { return localStorage.getItem("theme"); } catch { return null; } };
  const show = (theme) => { document.documentElement.dataset.theme = theme; };
  show(THEMES.includes(stored()) ? stored() : "auto");
  window.nextTheme = () => {
    const theme = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length];
    try { localStorage.setItem("theme", theme); } catch { /* private mode: it lasts as long as the page */ }
    show(theme);
  };
})();
