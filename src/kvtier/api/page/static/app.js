// The page: the choice of view, and the stream of events.

import { get, openSession, send } from "./api.js";
import { make, show } from "./dom.js";
import { Overview } from "./overview.js";
import { Prefixes } from "./prefixes.js";
import { Requests } from "./requests.js";
import { Servers } from "./servers.js";

const VIEWS = { overview: Overview, requests: Requests, prefixes: Prefixes, servers: Servers };
const MAX_REQUESTS = 1000;
const MAX_MOVES = 300;

// The last data from the stream, for views that are opened later.
const live = { state: null, run: "", requests: [], moves: [] };
const main = document.getElementById("main");
const status = document.getElementById("status");
let view = null;
let viewName = "";

function open() {
  const asked = location.hash.slice(1);
  const name = Object.hasOwn(VIEWS, asked) ? asked : "overview";
  if (asked === "main" && view !== null) return main.focus();
  if (name === viewName) return;
  if (view !== null) view.close();
  for (const dialog of document.querySelectorAll("dialog[open]")) dialog.close();
  viewName = name;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.getAttribute("href") === `#${name}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `kvtier: ${name}`;
  const place = make("div", { class: `view ${name}` });
  show(main, place);
  view = new VIEWS[name](place, live);
}

function takeState(state) {
  live.state = state;
  const rates = {};
  for (const tier of state.tiers) {
    if (tier.in_bytes_per_s !== null || tier.out_bytes_per_s !== null) rates[tier.name] = [tier.in_bytes_per_s || 0, tier.out_bytes_per_s || 0];
  }
  live.moves.push({ at: state.at, rates });
  if (live.moves.length > MAX_MOVES) live.moves.shift();
  status.textContent = state.status;
  status.className = state.status === "ready" ? "good" : "bad";
  if (view !== null && view.update) view.update(state);
}

// Newest first. Requests may arrive late or twice; after a restart of the server their numbers start again.
function takeRequests({ run, requests, skipped = 0 }) {
  const before = run === live.run ? live.requests : [];
  const isAnew = run !== live.run;
  live.run = run;
  const known = new Set(before.map((one) => one.number));
  const fresh = requests.filter((one) => !known.has(one.number));
  live.requests = [...fresh, ...before].sort((one, other) => other.number - one.number).slice(0, MAX_REQUESTS);
  if (view === null || !view.add) return;
  const isBehind = before.length && fresh.length && fresh[fresh.length - 1].number < before[0].number;
  if (isAnew || isBehind) view.refresh();
  else if (fresh.length) view.add(fresh, skipped);
}

function listen() {
  const stream = new EventSource("/kvtier/v1/events");
  stream.addEventListener("state", (event) => takeState(JSON.parse(event.data)));
  stream.addEventListener("requests", (event) => takeRequests(JSON.parse(event.data)));
  stream.addEventListener("open", loadRequests);
  stream.addEventListener("error", async () => {
    status.textContent = "connecting";
    status.className = "bad";
    if (stream.readyState === EventSource.CLOSED) {
      stream.close();
      setTimeout(check, 3000);
    }
  });
}

// Requests that ended before the stream began, or while it was interrupted.
async function loadRequests() {
  try {
    takeRequests(await get("requests?limit=200"));
  } catch (error) {
    if (error.status) notice(error); // without a status the server is gone; the stream reports that
  }
}

// After a log-out elsewhere, or a restart, the session is gone: only the log-in form is shown.
async function check() {
  try {
    const session = await openSession();
    if (session.is_in) listen();
    else location.reload();
  } catch {
    setTimeout(check, 3000);
  }
}

async function begin() {
  const session = await openSession();
  if (!session.is_in) return location.reload();
  const out = document.getElementById("log-out");
  out.hidden = !session.needs_key;
  out.addEventListener("click", async () => {
    await send("DELETE", "session");
    location.reload();
  });
  addEventListener("hashchange", open);
  addEventListener("unhandledrejection", (event) => notice(event.reason));
  open();
  listen();
}

function notice(error) {
  const place = document.getElementById("notice");
  place.hidden = false;
  place.textContent = String((error && error.message) || error);
}

begin().catch(notice);
