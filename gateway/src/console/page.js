"use strict";
// Reads the cluster every two seconds while the page is seen, and writes it into tables. What comes from the cluster becomes text
// only, never markup. A part that cannot be read keeps what it showed; the line above the tables says so.

const EVERY_MS = 2000;
const place = (id) => document.getElementById(id);
let key = sessionStorage.getItem("starling-key");

class NeedsKey extends Error {}

async function read(what) {
  const headers = key ? { authorization: "Bearer " + key } : {};
  const answer = await fetch("/ui/data/" + what, { headers, cache: "no-store" });
  if (answer.status === 401 || answer.status === 403) throw new NeedsKey((await answer.json()).error.message);
  if (!answer.ok) throw new Error(what + ": " + ((await answer.json().catch(() => null))?.error?.message ?? answer.status));
  return answer.json();
}

// A cell is a text, a number, or { text, look, link, share }.
function cell(value) {
  const td = document.createElement("td");
  const of = value !== null && typeof value === "object" ? value : { text: value };
  if (typeof of.text === "number") td.className = "number";
  if (of.look) td.classList.add(of.look);
  let into = td;
  if (of.link) {
    into = document.createElement("a");
    into.href = of.link;
    into.className = "id";
    td.append(into);
  }
  if (of.share !== undefined) {
    const meter = document.createElement("meter");
    meter.max = 1;
    meter.value = of.share;
    meter.title = percent(of.share);
    td.append(meter, " ");
  }
  into.append(of.text === null || of.text === undefined || of.text === "" ? "–" : String(of.text));
  return td;
}

function table(columns, rows, nothing) {
  if (rows.length === 0) {
    const p = document.createElement("p");
    p.className = "soft";
    p.textContent = nothing;
    return p;
  }
  const out = document.createElement("table");
  const head = out.createTHead().insertRow();
  columns.forEach((name, at) => {
    const th = document.createElement("th");
    th.scope = "col";
    const first = rows[0].cells[at];
    if (typeof (first?.text ?? first) === "number") th.className = "number";
    th.textContent = name;
    head.append(th);
  });
  const body = out.createTBody();
  for (const { cells, look } of rows) {
    const tr = body.insertRow();
    if (look) tr.className = look;
    tr.append(...cells.map(cell));
  }
  return out;
}

const show = (id, ...parts) => place(id).replaceChildren(...parts);
const row = (...cells) => ({ cells });
const ms = (value) => (value === null || value === undefined ? null : value < 10 ? value.toFixed(1) + " ms" : Math.round(value) + " ms");
const percent = (share) => (share * 100).toFixed(1) + " %";
const count = (number, what) => number + " " + what + (number === 1 ? "" : "s");
const pairs = (labels) => Object.entries(labels ?? {}).map(([name, value]) => name + "=" + value).join(" ");

function age(seconds) {
  if (seconds < 60) return Math.round(seconds) + " s";
  if (seconds < 3600) return Math.round(seconds / 60) + " min";
  return (seconds / 3600).toFixed(1) + " h";
}

function bytes(value) {
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (value < 1024 || unit === "GiB") return (unit === "B" ? value : value.toFixed(1)) + " " + unit;
    value /= 1024;
  }
}

function state(word) {
  const look = { alive: "good", serving: "good", running: "good", yes: "good", suspect: "wait", draining: "wait", warming: "wait", joining: "wait", restarting: "wait", "last resort": "wait" };
  return { text: word, look: look[word] ?? "bad" };
}

function missing(list, id) {
  return (list ?? []).map((one) => {
    const p = document.createElement("p");
    p.className = "wait";
    p.textContent = "no answer from " + one.node + ": " + one.reason;
    return p;
  });
}

function nodes(list) {
  const columns = ["node", "state", "life", "roles", "address", "HTTP", "instances", "labels", "software"];
  const line = (node) => row(node.name, state(node.state), state(node.lifecycle), node.roles.join(", "), node.address, node.http, node.instances, pairs(node.labels), node.software);
  show("nodes", table(columns, list.map(line), "no node"));
}

function workers(list, kv) {
  const rows = list.filter((one) => one.kind === "worker").map((one) => {
    const index = one.endpoint.match(/worker-(\d+)\//)?.[1];
    const name = index === undefined ? one.node : one.node + "/" + index;
    const tiers = kv.caches.filter((cache) => cache.worker === name);
    const device = tiers.find((cache) => cache.tier === "device");
    const below = tiers.filter((cache) => cache.tier !== "device").map((cache) => cache.tier + " " + cache.blocks + "/" + cache.blocks_max + (cache.faults ? ", " + cache.faults + " faults" : ""));
    const used = device && device.blocks_max ? device.blocks / device.blocks_max : undefined;
    const hit = device && device.asked ? percent(device.hits / device.asked) : null;
    return row(name, one.model, state(one.lifecycle), state(one.routable), one.capacity, used === undefined ? null : { share: used, text: device.blocks + " of " + device.blocks_max }, hit, below.join("; "), pairs(one.labels));
  });
  const columns = ["worker", "model", "life", "routable", "requests at once", "KV blocks", "prompt tokens from cache", "tiers below", "labels"];
  show("workers", ...missing(kv.missing), table(columns, rows, "no worker yet: starling join ADDRESS --role worker"));
}

function plan(all) {
  const seen = (p50, p99, target) => (p50 === null ? "–" : Math.round(p50) + " / " + Math.round(p99)) + " of " + target + " ms";
  const rows = all.plans.map((one) => {
    const now = one.outlook;
    if (!now) return row(one.model, one.mode, one.leader, ...Array(8).fill(null), "has not looked long enough");
    const roles = ["both", "prefill", "decode"].filter((role) => now.now[role] + now.wanted[role] > 0);
    const counts = (fleet) => roles.map((role) => fleet[role] + " " + role).join(", ");
    const changes = counts(now.now) !== counts(now.wanted);
    const last = one.past[0] ? age(one.past[0].ago_secs) + " ago, " + one.past[0].outcome + ": " + one.past[0].action : null;
    const figures = now.figures;
    return row(one.model, one.mode, one.leader, counts(now.now), { text: counts(now.wanted), look: changes ? "wait" : "good" }, { share: Math.min(1, now.pressure), text: percent(now.pressure) }, figures.rate.toFixed(1), figures.waiting, seen(figures.ttft_p50_ms, figures.ttft_p99_ms, one.ttft_ms), seen(figures.itl_p50_ms, figures.itl_p99_ms, one.itl_ms), last, now.decision.reason);
  });
  const columns = ["model", "planner", "leader", "now", "wanted", "load", "requests/s", "waiting", "TTFT p50 / p99", "ITL p50 / p99", "last decision", "says"];
  show("plan", ...missing(all.missing), table(columns, rows, "no router plans: --planner off, or no worker yet"));
}

function instances(list) {
  const rows = list.filter((one) => one.kind !== "worker").map((one) => row(one.endpoint, one.node, one.kind, state(one.lifecycle), state(one.routable), pairs(one.labels)));
  show("instances", table(["endpoint", "node", "kind", "life", "routable", "labels"], rows, "none"));
}

function requests(newest) {
  const rows = newest.requests.map((one) => {
    const came = one.outcome;
    return row({ text: one.request.slice(0, 12), link: "#why/" + one.request }, age(one.ago_ms / 1000), one.model, one.worker, one.prompt_tokens, one.hit_blocks, ms(one.waited_ms || null), ms(one.predicted_ttft_ms), ms(came?.ttft_ms), came ? came.answer_tokens : null, ms(came?.total_ms), came?.resumed ? { text: came.resumed, look: "wait" } : null);
  });
  const columns = ["request", "ago", "model", "worker", "prompt", "hit blocks", "waited", "TTFT expected", "TTFT", "tokens", "total", "went on elsewhere"];
  show("requests", ...missing(newest.missing), table(columns, rows, "no request yet"));
}

function actors(all) {
  const rows = all.actors.map((one) => row(one.node, one.path, one.kind, state(one.state), one.restarts ? { text: one.restarts, look: "wait" } : 0, one.mailbox_depth, age(one.uptime_secs), one.owner));
  show("actors", ...missing(all.missing), table(["node", "actor", "kind", "state", "restarts", "mailbox", "up", "owner"], rows, "none"));
}

function receipt([router, one]) {
  const title = document.createElement("h3");
  title.textContent = "router " + router + ", policy " + one.policy + ": " + one.workers + " workers, prompt of " + one.prompt_tokens + " tokens, " + one.near_equals + " as good as the cheapest";
  const terms = one.candidates[0]?.terms.map(([name]) => name) ?? [];
  const rows = one.candidates.map((seen, at) => ({
    look: at === one.chosen ? "chosen" : "",
    cells: [{ text: at === one.chosen ? "chosen" : " " }, { text: seen.worker.node + "/" + seen.worker.index }, seen.hit_blocks, seen.in_flight, seen.queued_tokens, seen.cost.toFixed(1), ...seen.terms.map(([, value]) => value.toFixed(1))],
  }));
  const end = document.createElement("p");
  const came = one.outcome;
  end.textContent = came
    ? "came of it: " + came.cached_tokens + " prompt tokens cached, first token after " + ms(came.ttft_ms) + ", " + came.answer_tokens + " tokens in " + ms(came.total_ms)
    : "came of it: it runs, or was refused or lost there";
  return [title, table(["", "worker", "hit blocks", "in flight", "queued tokens", "cost", ...terms], rows, "no candidate"), end];
}

async function why() {
  const id = location.hash.match(/^#why\/([0-9a-f]{32})$/)?.[1];
  if (!id) return show("why");
  const found = await read("why/" + id);
  const none = document.createElement("p");
  none.textContent = "no router remembers request " + id;
  show("why", ...missing(found.missing), ...(found.receipts.length ? found.receipts.flatMap(receipt) : [none]));
}

async function all() {
  const [members, list, kv, plans, newest] = await Promise.all(["nodes", "instances", "kv", "plan", "requests"].map(read));
  nodes(members);
  workers(list, kv);
  plan(plans);
  instances(list);
  requests(newest);
  const away = members.filter((node) => node.state !== "alive").length;
  const ready = list.filter((one) => one.kind === "worker" && one.routable === "yes").length;
  place("summary").textContent = count(members.length, "node") + (away ? ", " + away + " not alive" : "") + "; " + count(ready, "worker") + (ready === 1 ? " takes" : " take") + " requests";
  await why();
  if (document.querySelector("details").open) actors(await read("actors"));
}

async function look() {
  try {
    await all();
    place("login").hidden = true;
    place("fault").hidden = true;
    place("clock").textContent = "as of " + new Date().toLocaleTimeString();
    document.body.dataset.state = "shown";
  } catch (error) {
    place("login").hidden = !(error instanceof NeedsKey);
    place("fault").hidden = false;
    place("fault").textContent = error.message;
    document.body.dataset.state = "fault";
  }
}

place("login").addEventListener("submit", (event) => {
  event.preventDefault();
  key = place("key").value;
  sessionStorage.setItem("starling-key", key);
  look();
});
addEventListener("hashchange", look);
document.querySelector("details").addEventListener("toggle", look);

(async () => {
  for (;;) {
    if (!document.hidden) await look();
    await new Promise((again) => setTimeout(again, EVERY_MS));
  }
})();
