// Downloads: the data, or the plots as on the page.

const HEADING = 24;
const TICKS = 5;

export function save(name, type, data) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(data instanceof Blob ? data : new Blob([data], { type }));
  link.download = name.replace(/[^\w.-]+/g, "-");
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

// An SVG of all plots below each other, for papers.
export function vector(charts, colors) {
  const [quiet, grid, , , ink, card] = colors;
  const width = Math.max(...charts.map(({ plot }) => plot.width));
  const parts = [];
  let top = 0;
  for (const { plot, title } of charts) {
    const box = { left: plot.bbox.left / devicePixelRatio, top: plot.bbox.top / devicePixelRatio, width: plot.bbox.width / devicePixelRatio, height: plot.bbox.height / devicePixelRatio };
    const x = (value) => (box.left + plot.valToPos(value, "x")).toFixed(1);
    const y = (value) => (box.top + plot.valToPos(value, "y")).toFixed(1);
    parts.push(`<g transform="translate(0 ${top})"><text x="10" y="16" font-size="14" fill="${ink}">${escaped(title)}</text><g transform="translate(0 ${HEADING})">`);
    for (const value of ticks(plot.scales.y)) {
      parts.push(`<line x1="${box.left}" x2="${box.left + box.width}" y1="${y(value)}" y2="${y(value)}" stroke="${grid}"/>`);
      parts.push(`<text x="${box.left - 6}" y="${y(value)}" dy="4" font-size="11" text-anchor="end" fill="${quiet}">${figure(value)}</text>`);
    }
    for (const value of ticks(plot.scales.x)) {
      const said = plot.scales.x.time ? new Date(value * 1000).toLocaleString() : figure(Math.round(value));
      parts.push(`<text x="${x(value)}" y="${box.top + box.height + 18}" font-size="11" text-anchor="middle" fill="${quiet}">${escaped(said)}</text>`);
    }
    plot.series.forEach((series, index) => {
      if (index === 0 || !series.show) return;
      const line = [];
      plot.data[0].forEach((at, i) => {
        const value = plot.data[index][i];
        if (value !== null && value !== undefined && (plot.scales.y.distr !== 3 || value > 0)) line.push(`${x(at)},${y(value)}`);
      });
      const [color, alpha] = shade(typeof series.stroke === "function" ? series.stroke(plot, index) : series.stroke);
      if (line.length) parts.push(`<polyline points="${line.join(" ")}" fill="none" stroke="${color}" stroke-opacity="${alpha}" stroke-width="1.5"/>`);
    });
    parts.push("</g></g>");
    top += plot.height + HEADING;
  }
  return `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${top}" viewBox="0 0 ${width} ${top}" font-family="sans-serif"><rect width="100%" height="100%" fill="${card}"/>${parts.join("")}</svg>\n`;
}

function ticks({ min, max, distr }) {
  if (min === null || min === undefined || !(max > min)) return [];
  const part = (i) => i / (TICKS - 1);
  const value = distr === 3 ? (i) => min * (max / min) ** part(i) : (i) => min + (max - min) * part(i);
  return Array.from({ length: TICKS }, (_, i) => value(i));
}

function figure(value) {
  if (value === 0) return "0";
  return Math.abs(value) < 0.001 || Math.abs(value) >= 1e6 ? value.toExponential(1) : String(Number(value.toPrecision(4)));
}

function shade(color) {
  return /^#[0-9a-f]{8}$/i.test(color) ? [color.slice(0, 7), (parseInt(color.slice(7), 16) / 255).toFixed(2)] : [color, 1];
}

function escaped(text) {
  return String(text).replace(/[&<>"]/g, (found) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[found]);
}
