// Draws the plots of a recorded run.

const data = JSON.parse(document.getElementById("data").textContent);
const charts = new Charts();
charts.name = data.name;
charts.take(
  { generation: 0, first: 0, points: data.points, validations: data.validations },
  data.plans.map(([at_s, text]) => ({ kind: "plan", at_s, text })),
);
charts.draw();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => charts.draw());
