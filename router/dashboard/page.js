
"use strict";
// What the router says of itself, asked every two seconds. All text goes in as text, never as markup.

const TICK = 2, WINDOWS = [60, 150, 300], SMOOTH = 5, MINUTE = 30;
const state = {key: "", samples: new Map(), last: -1, report: null, sort: {column: 0, down: false}, hover: null};
const $ = (id) => document.getElementById(id);

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) if (value != null) made.setAttribute(key, value);
  made.append(...children.filter((child) => child != null));
  return made;
}

// Numbers as people read them; a dash where nothing is known.
const whole = (n) => n == null ? "–" : Math.round(n).toLocaleString("en");
const rate = (n) => n == null ? "–" : n < 10 && !Number.isInteger(n) ? n.toFixed(1) : whole(n);
const share = (n) => n == null ? "–" : `${+(100 * n).toFixed(1)}%`;
function seconds(s) {
  if (!s) return s === 0 ? "0" : "–";
  if (s < 0.0095) return `${(1000 * s).toFixed(1)} ms`;
  return s < 0.9995 ? `${Math.round(1000 * s)} ms` : s < 100 ? `${s.toFixed(2)} s` : `${Math.round(s)} s`;
}
const over = (part, all) => all > 0 ? part / all : null;

// One tick as the router sends it, an array of these in this order.
const FIELDS = ["tick", "requests", "unserved", "queried", "predicted", "hits", "inFlight", "queued", "firstToken"];
const named = (values) => Object.fromEntries(FIELDS.map((field, index) => [field, values[index]]));

function sum(samples) {
  const known = samples.filter(Boolean);
  if (!known.length) return null;
  const total = {ticks: known.length, firstToken: known[0].firstToken.map(() => 0)};
  for (const field of ["requests", "unserved", "queried", "predicted", "hits"])
    total[field] = known.reduce((all, sample) => all + sample[field], 0);
  for (const sample of known) sample.firstToken.forEach((count, bucket) => { total.firstToken[bucket] += count; });
  return total;
}

function quantile(bounds, counts, wanted) {
  const all = counts.reduce((a, b) => a + b, 0);
  if (!all) return null;
  let below = 0;
  for (let bucket = 0; bucket < bounds.length; bucket++) {
    if (below + counts[bucket] >= wanted * all) {
      const low = bucket ? bounds[bucket - 1] : 0;
      return low + (bounds[bucket] - low) * (wanted * all - below) / counts[bucket];
    }
    below += counts[bucket];
  }
  return bounds[bounds.length - 1];
}

// Charts

const CHARTS = [
  {title: "Requests per second", format: rate, series: [
    {name: "ended", kind: "one", fill: true, of: (now) => now && now.requests / TICK},
    {name: "refused or failed", kind: "bad", of: (now) => now && now.unserved / TICK}]},
  {title: "Time to first token", note: "streamed answers, over 10 s", format: seconds, series: [
    {name: "p50", kind: "one", of: (_, lately, bounds) => lately && quantile(bounds, lately.firstToken, 0.5)},
    {name: "p99", kind: "two", of: (_, lately, bounds) => lately && quantile(bounds, lately.firstToken, 0.99)}]},
  {title: "Prefix cache hit rate", note: "of prompt tokens, over 10 s", format: share, most: 1, series: [
    {name: "found by the engines", kind: "one", fill: true, of: (_, lately) => lately && over(lately.hits, lately.queried)},
    {name: "predicted", kind: "two", of: (_, lately) => lately && over(lately.predicted, lately.queried)}]},
  {title: "Requests in the router", format: rate, series: [
    {name: "in flight", kind: "one", fill: true, of: (now) => now && now.inFlight},
    {name: "queued", kind: "two", of: (now) => now && now.queued}]},
];

function niceAbove(value) {
  const power = 10 ** Math.floor(Math.log10(value || 1));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value * 0.999);
}

const SVG = "http://www.w3.org/2000/svg";
function shape(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text != null) made.textContent = text;
  return made;
}

function line(values, x, y, base) {
  let path = "", begun = null;
  values.forEach((value, index) => {
    if (value == null) { begun = null; return; }
    path += `${begun == null ? "M" : "L"}${x(index).toFixed(1)} ${y(value).toFixed(1)}`;
    begun = begun ?? index;
    const ends = index === values.length - 1 || values[index + 1] == null;
    if (ends && base != null) path += `L${x(index).toFixed(1)} ${base}L${x(begun).toFixed(1)} ${base}Z`;
    else if (ends && begun === index) path += "h0.1";
  });
  return path;
}

function drawChart(chart, slots, bounds) {
  const width = chart.svg.clientWidth || 480, height = 170, left = 52, right = 6, top = 8, bottom = height - 20;
  const values = chart.series.map((series) => slots.map((now, index) =>
    series.of(now, now && sum(slots.slice(Math.max(0, index - SMOOTH + 1), index + 1)), bounds)));
  const highest = Math.max(0, ...values.flat().filter((value) => value != null));
  const most = chart.most ?? niceAbove(highest);
  const last = slots.length - 1, x = (index) => left + (width - left - right) * index / last;
  const y = (value) => bottom - (bottom - top) * Math.min(1, value / most);
  const shapes = [];
  for (const part of [0, 0.5, 1]) {
    shapes.push(shape("line", {x1: left, x2: width - right, y1: y(part * most), y2: y(part * most)}));
    shapes.push(shape("text", {x: left - 8, y: y(part * most) + 4, "text-anchor": "end"}, chart.format(part * most)));
  }
  const ago = (index) => index === last ? "now" : `−${Math.round((last - index) * TICK / 6) / 10} min`;
  for (const [index, anchor] of [[0, "start"], [last / 2, "middle"], [last, "end"]])
    shapes.push(shape("text", {x: x(index), y: height - 4, "text-anchor": anchor}, ago(index)));
  chart.series.forEach((series, index) => {
    if (series.fill) shapes.push(shape("path", {class: "fill", d: line(values[index], x, y, bottom)}));
  });
  chart.series.forEach((series, index) => shapes.push(shape("path", {class: series.kind, d: line(values[index], x, y)})));
  if (values.every((row) => row.every((value) => value == null)))
    shapes.push(shape("text", {class: "empty", x: (left + width) / 2, y: (top + bottom) / 2 - 8}, "nothing yet"));
  const at = state.hover == null ? last : Math.round(state.hover * last);
  if (state.hover != null) shapes.push(shape("line", {class: "cursor", x1: x(at), x2: x(at), y1: top, y2: bottom}));
  chart.svg.replaceChildren(...shapes);
  chart.svg.setAttribute("aria-label", `${chart.title}, ${chart.series.map((s, i) => `${s.name} ${chart.format(values[i][at])}`).join(", ")}`);
  chart.legend.replaceChildren(...chart.series.map((series, index) => element("span", {}, element("i", {class: series.kind}),
    series.name, element("b", {}, chart.format(values[index][at])))), element("span", {class: "when"}, state.hover == null ? "" : `${(last - at) * TICK} s before now`));
}

function buildCharts() {
  for (const chart of CHARTS) {
    chart.legend = element("div", {class: "legend"});
    chart.svg = shape("svg", {role: "img"});
    const heading = element("h2", {}, chart.title, chart.note ? element("small", {}, chart.note) : null);
    $("charts").append(element("div", {class: "card"}, heading, chart.legend, chart.svg));
    chart.svg.addEventListener("pointermove", (event) => {
      const box = chart.svg.getBoundingClientRect();
      state.hover = Math.min(1, Math.max(0, (event.clientX - box.left - 52) / (box.width - 58)));
      drawCharts();
    });
    chart.svg.addEventListener("pointerleave", () => { state.hover = null; drawCharts(); });
  }
}

// The last two, five or ten minutes, as far back as there is something to show; null where nothing is known.
function slots() {
  const known = state.last - Math.min(...state.samples.keys()) + 1;
  const length = WINDOWS.find((ticks) => ticks >= known) ?? WINDOWS.at(-1);
  return Array.from({length}, (_, index) => state.samples.get(state.last - length + 1 + index) ?? null);
}

function drawCharts() {
  if (!state.report) return;
  const filled = slots();
  for (const chart of CHARTS) drawChart(chart, filled, state.report.bounds);
}

// Now

function tile(title, value, note) {
  return element("div", {class: "tile"}, element("h3", {}, title), element("b", {}, value), element("p", {}, note));
}

function drawNow(report) {
  const minute = sum(slots().slice(-MINUTE)), ticks = minute ? minute.ticks * TICK : 0;
  const accepting = report.replicas.filter((r) => takesWork(r.said)).length;
  const p = (wanted) => minute && quantile(report.bounds, minute.firstToken, wanted);
  const lost = minute && minute.unserved ? `${whole(minute.unserved)} refused or failed` : "none refused or failed";
  $("tiles").replaceChildren(
    tile("Requests per second", rate(minute && minute.requests / ticks), `last minute; ${lost}`),
    tile("Time to first token, median", seconds(p(0.5)), `last minute; p99 ${seconds(p(0.99))}`),
    tile("Prefix cache hit rate", share(minute && over(minute.hits, minute.queried)),
      `last minute; predicted ${share(minute && over(minute.predicted, minute.queried))}`),
    tile("Requests in flight", whole(report.in_flight), report.queued ? `${whole(report.queued)} queued` : "none queued"),
    tile("Replicas taking work", `${accepting} of ${report.replicas.length}`,
      `${whole(report.replicas.reduce((all, r) => all + (r.said.blocks ?? 0), 0))} blocks known`));
  $("about").textContent = `${report.policy} · ${report.version}`;
  const view = {exact: "good", approximate: "good", stale: "warn", hash: "bad"}[report.view];
  const pill = (kind, name, value) => element("li", {}, element("span", {class: `dot ${kind}`}), name, " ", element("b", {}, value));
  $("pills").replaceChildren(
    pill(view, "view", report.view === "stale" ? `stale, ${seconds(report.view_age_seconds)}` : report.view),
    report.redis == null ? pill("", "Redis", "none") : pill(report.redis ? "good" : "bad", "Redis", report.redis ? "up" : "away"),
    ...(report.workers > 1 ? [pill("good", "workers", whole(report.workers))] : []));
}

// Fleet

const takesWork = (said) => said.reachable && ["accepting", "incompatible"].includes(said.state) && said.breaker !== "open";

function stateOf(said) {
  if (!said.reachable) return ["bad", "unreachable"];
  if (said.breaker !== "closed") return [said.breaker === "open" ? "bad" : "warn", `breaker ${said.breaker}`];
  return [{accepting: "good"}[said.state] ?? "warn", said.state];
}

function bar(part, mark) {
  const fill = element("span"), whole = element("span", {class: "bar"}, fill);
  fill.style.width = `${100 * Math.min(1, part ?? 0)}%`;
  if (mark != null) {
    const tick = element("em");
    tick.style.left = `calc(${100 * Math.min(1, mark)}% - 1px)`;
    whole.append(tick);
  }
  return whole;
}

const FLEET = [
  {name: "replica", key: (r) => r.said.id, cell: (r) => [element("span", {title: r.said.url}, r.said.id)], kind: "name"},
  {name: "model", key: (r) => r.said.model ?? "", cell: (r) => [r.said.model ?? "any"], kind: "quiet"},
  {name: "state", key: (r) => stateOf(r.said)[1], cell: (r) => {
    const [kind, text] = stateOf(r.said);
    return [element("span", {title: r.said.incompatibility}, element("span", {class: `dot ${kind}`}), text)];
  }},
  {name: "in flight", key: (r) => r.said.active, cell: (r) => [whole(r.said.active)], kind: "number"},
  {name: "running", key: (r) => r.said.load?.running ?? -1, cell: (r) => [whole(r.said.load?.running)], kind: "number"},
  {name: "waiting", key: (r) => r.said.load?.waiting ?? -1, cell: (r) => [whole(r.said.load?.waiting)], kind: "number"},
  {name: "prefill wait", key: (r) => r.said.wait_seconds, cell: (r) => [seconds(r.said.wait_seconds)], kind: "number"},
  {name: "blocks held", key: (r) => over(r.said.blocks, r.said.capacity_blocks) ?? -1, cell: (r) => r.said.blocks == null ? ["unknown"] :
    [bar(over(r.said.blocks, r.said.capacity_blocks)), `${whole(r.said.blocks)} `, element("span", {class: "quiet"}, `of ${whole(r.said.capacity_blocks)}`)]},
  {name: "hit rate, predicted", key: (r) => over(r.hit_tokens, r.queried_tokens) ?? -1, cell: (r) => {
    const hit = over(r.hit_tokens, r.queried_tokens), predicted = over(r.predicted_tokens, r.queried_tokens);
    return hit == null ? ["–"] : [bar(hit, predicted), `${share(hit)} `, element("span", {class: "quiet"}, share(predicted))];
  }},
  {name: "trust", key: (r) => r.said.trust, cell: (r) => [element("span", {class: r.said.trust < 0.5 ? "bad" : r.said.trust < 0.9 ? "warn" : null}, r.said.trust.toFixed(2))], kind: "number"},
  {name: "requests", key: (r) => r.requests, cell: (r) => [whole(r.requests)], kind: "number"},
  {name: "failures", key: (r) => r.failures, cell: (r) => [element("span", {class: r.failures ? "bad" : "quiet"}, whole(r.failures))], kind: "number"},
];

const RECENT = [
  {name: "ended", cell: (d) => [new Date(1000 * d.ended_at).toLocaleTimeString("en-GB")], kind: "quiet"},
  {name: "replica", cell: (d) => [d.replica], kind: "name"},
  {name: "reason", cell: (d) => [d.reason]},
  {name: "view", cell: (d) => [d.view], kind: "quiet"},
  {name: "prompt", cell: (d) => [whole(d.prompt_tokens)], kind: "number"},
  {name: "predicted", cell: (d) => [whole(d.predicted_tokens)], kind: "number"},
  {name: "cached", cell: (d) => [whole(d.cached_tokens)], kind: "number"},
  {name: "first byte", cell: (d) => [seconds(d.first_byte_seconds)], kind: "number"},
  {name: "whole", cell: (d) => [seconds(d.seconds)], kind: "number"},
  {name: "tries", cell: (d) => [element("span", {class: d.attempts > 1 ? "warn" : "quiet"}, whole(d.attempts))], kind: "number"},
  {name: "outcome", cell: (d) => [element("span", {class: d.outcome === "ok" ? "quiet" : d.outcome === "client_gone" ? "warn" : "bad"},
    d.outcome === "ok" ? `${d.status}` : d.outcome)]},
  {name: "model", cell: (d) => [d.model], kind: "quiet"},
  {name: "request id", cell: (d) => [d.id], kind: "quiet"},
];

function drawRows(table, columns, rows) {
  const cells = (row) => columns.map((column) => element("td", {class: column.kind}, ...column.cell(row)));
  table.tBodies[0].replaceChildren(...rows.map((row) => element("tr", {}, ...cells(row))));
}

function buildHead(table, columns, sortable) {
  const heads = columns.map((column, index) => {
    const kind = column.kind === "number" ? "number" : null;
    if (!sortable) return element("th", {scope: "col", class: kind}, column.name);
    const button = element("button", {type: "button"}, column.name);
    button.addEventListener("click", () => {
      state.sort = {column: index, down: state.sort.column === index ? !state.sort.down : index > 2};
      if (state.report) drawFleet(state.report);
    });
    return element("th", {scope: "col", class: kind}, button);
  });
  table.tHead.replaceChildren(element("tr", {}, ...heads));
}

function drawFleet(report) {
  const {column, down} = state.sort, key = FLEET[column].key, names = new Intl.Collator("en", {numeric: true});
  const order = (a, b) => typeof key(a) === "string" ? names.compare(key(a), key(b)) : key(a) - key(b);
  const rows = [...report.replicas].sort((a, b) => (down ? -1 : 1) * order(a, b) || names.compare(a.said.id, b.said.id));
  [...$("fleet").tHead.rows[0].cells].forEach((cell, index) =>
    index === column ? cell.setAttribute("aria-sort", down ? "descending" : "ascending") : cell.removeAttribute("aria-sort"));
  drawRows($("fleet"), FLEET, rows);
  $("fleet").hidden = !rows.length;
  $("fleet-empty").hidden = rows.length > 0;
  $("fleet-note").textContent = rows.length ? "requests and hit rates since the router began; the orange mark is what was predicted" : "";
}

// Asking

function take(report) {
  for (const values of report.samples) {
    const sample = named(values);
    state.samples.set(sample.tick, sample);
    state.last = Math.max(state.last, sample.tick);
  }
  for (const tick of state.samples.keys()) if (tick <= state.last - WINDOWS.at(-1)) state.samples.delete(tick);
  state.report = report;
  $("main").hidden = false;
  drawNow(report);
  drawCharts();
  drawFleet(report);
  drawRows($("recent"), RECENT, report.recent);
  $("recent").hidden = !report.recent.length;
  $("recent-empty").hidden = report.recent.length > 0;
}

function trouble(text) {
  $("trouble").hidden = !text;
  $("trouble").textContent = text;
}

async function ask() {
  const headers = state.key ? {authorization: `Bearer ${state.key}`} : {};
  const response = await fetch(`dashboard/data?since=${state.last}`, {headers, cache: "no-store", credentials: "omit"});
  if (response.ok) {
    $("key").hidden = true;
    trouble("");
    take(await response.json());
    return true;
  }
  const error = (await response.json().catch(() => ({}))).error ?? {};
  if (response.status !== 401) {
    trouble(error.message ?? `The router answers ${response.status}.`);
    return true;
  }
  if (state.key) $("key-note").textContent = "That is not the key.";
  state.key = "";
  $("key").hidden = false;
  $("main").hidden = true;
  $("key-input").focus();
  return false;
}

let timer = 0;
async function keepAsking() {
  clearTimeout(timer);
  let goOn = true;
  try {
    goOn = await ask();
  } catch {
    trouble("The router does not answer. Asking again every two seconds.");
  }
  if (goOn) timer = setTimeout(keepAsking, 1000 * TICK);
}

$("key").addEventListener("submit", (event) => {
  event.preventDefault();
  state.key = $("key-input").value.trim();
  $("key-input").value = "";
  keepAsking();
});
window.addEventListener("resize", drawCharts);
buildHead($("fleet"), FLEET, true);
buildHead($("recent"), RECENT, false);
buildCharts();
keepAsking();
