// The live panel: numbers and short curves from /metrics, once a second while the page is looked at.

import { ask } from "./client.js";

const LENGTH = 60; // points of a curve
const PREFIX = "deepinfer:";
const list = document.getElementById("gauges");

// The samples of the text format by name, labels left aside (a server has one model); buckets are skipped.
function parse(page) {
  const samples = {};
  for (const line of page.split("\n")) {
    if (!line.startsWith(PREFIX)) continue;
    const name = line.slice(PREFIX.length).split(/[{ ]/, 1)[0];
    if (!name.endsWith("_bucket")) samples[name] = (samples[name] ?? 0) + Number(line.slice(line.lastIndexOf(" ")));
  }
  return samples;
}

const rate = (now, last, name, seconds) => (now[name] - last[name]) / seconds;
const mean = (now, last, name) => {
  const count = now[`${name}_count`] - last[`${name}_count`];
  return count > 0 ? (now[`${name}_sum`] - last[`${name}_sum`]) / count : null;
};
const share = (now, part, whole) => (now[whole] > 0 ? now[part] / now[whole] : null);

// What is drawn: a name, its value from two pages, and how it is written.
const GAUGES = [
  ["Tokens/s", (n, l, s) => rate(n, l, "generation_tokens_total", s), (v) => v.toFixed(0)],
  ["Running", (n) => n.num_requests_running, (v) => v.toFixed(0)],
  ["Waiting", (n) => n.num_requests_waiting, (v) => v.toFixed(0)],
  ["Cache in use", (n) => n.kv_cache_usage_perc, (v) => `${(100 * v).toFixed(1)} %`],
  ["Time to first token", (n, l) => mean(n, l, "time_to_first_token_seconds"), (v) => `${(1000 * v).toFixed(0)} ms`],
  ["Between tokens", (n, l) => mean(n, l, "inter_token_latency_seconds"), (v) => `${(1000 * v).toFixed(1)} ms`],
  ["Cache hits", (n) => share(n, "prefix_cache_hits_total", "prompt_tokens_total"), (v) => `${(100 * v).toFixed(1)} %`],
  ["Accepted length", (n) => share(n, "spec_decode_num_accepted_tokens_total", "spec_decode_num_drafts_total"), (v) => v.toFixed(2)],
].map(([name, value, write]) => {
  const row = document.createElement("div");
  const [term, number] = [document.createElement("dt"), document.createElement("dd")];
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const curve = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
  svg.setAttribute("viewBox", `0 0 ${LENGTH - 1} 1`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-hidden", "true");
  svg.append(curve);
  term.textContent = name;
  number.textContent = "–";
  row.append(term, number, svg);
  list.append(row);
  return { value, write, number, curve, points: [] };
});

function draw(gauge, value) {
  if (value === null || Number.isNaN(value)) return;
  gauge.number.textContent = gauge.write(value);
  gauge.points = [...gauge.points, value].slice(-LENGTH);
  const top = Math.max(...gauge.points) || 1;
  const shift = LENGTH - gauge.points.length;
  gauge.curve.setAttribute("points", gauge.points.map((v, i) => `${i + shift},${0.97 - 0.94 * (v / top)}`).join(" "));
}

let last = null;
async function look() {
  if (document.hidden || !document.getElementById("live").open) return;
  try {
    const response = await ask("metrics");
    if (!response.ok) return;
    const now = { ...parse(await response.text()), at: performance.now() };
    if (last) for (const gauge of GAUGES) draw(gauge, gauge.value(now, last, (now.at - last.at) / 1000));
    last = now;
  } catch {
    last = null; // the server is away; the curves go on when it is back
  }
}
setInterval(look, 1000);
look();
