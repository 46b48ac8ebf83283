// The newest requests, and why a request found no more in the cache.

import { get } from "./api.js";
import { bar, make, row, show } from "./dom.js";
import { clock, count, inOrder, kindOf, nameOf, seconds, share, sum } from "./format.js";

const MAX_ROWS = 200;
const WORDS = { all: "no full block was left" };
const COLUMNS = ["Time", "Model", "Prompt", "Cached", "By tier", "First token", "The match ended", ""];

export class Requests {
  constructor(place, live) {
    this.live = live;
    this.isPaused = false;
    this.filter = "";
    this.body = make("tbody");
    this.skipped = make("p", { class: "quiet", role: "status" });
    this.pause = make("button", { type: "button", "aria-pressed": "false", onclick: () => this.togglePause() }, "Pause");
    const filter = make("input", { type: "search", "aria-label": "Only models whose name contains", placeholder: "model", oninput: () => {
      this.filter = filter.value.toLowerCase();
      this.showAll();
    } });
    show(place,
      make("h2", {}, "Requests"),
      make("p", { class: "buttons" }, this.pause, filter),
      this.skipped,
      make("table", { class: "requests" },
        make("caption", {}, "The last requests that were answered, the newest first"),
        make("thead", {}, make("tr", {}, COLUMNS.map((name) => make("th", { scope: "col" }, name)))),
        this.body));
    this.showAll();
  }

  togglePause() {
    this.isPaused = !this.isPaused;
    this.pause.setAttribute("aria-pressed", String(this.isPaused));
    this.pause.textContent = this.isPaused ? "Go on" : "Pause";
    if (!this.isPaused) this.showAll();
  }

  matches(request) {
    return request.model.toLowerCase().includes(this.filter);
  }

  showAll() {
    const wanted = this.live.requests.filter((one) => this.matches(one)).slice(0, MAX_ROWS);
    this.body.replaceChildren(...wanted.map((one) => this.row(one)));
    if (wanted.length) this.skipped.textContent = "";
    else if (this.live.requests.length) this.skipped.textContent = `None of the last ${count(this.live.requests.length)} requests is for such a model.`;
    else this.skipped.textContent = "No request has ended yet.";
  }

  // Older requests may have changed, too: show all again.
  refresh() {
    if (!this.isPaused) this.showAll();
  }

  add(requests, skipped) {
    if (this.isPaused) return;
    this.skipped.textContent = skipped ? `${count(skipped)} more requests have ended that are not shown.` : "";
    this.body.prepend(...requests.filter((one) => this.matches(one)).map((one) => this.row(one)));
    while (this.body.childElementCount > MAX_ROWS) this.body.lastElementChild.remove();
  }

  row(request) {
    const cached = sum(request.cached_tokens);
    const tiers = inOrder(Object.keys(request.cached_tokens));
    const text = tiers.map((tier) => `${nameOf(tier)} ${count(request.cached_tokens[tier])}`).join(", ");
    const parts = tiers.map((tier) => ({ share: request.cached_tokens[tier] / (request.prompt_tokens || 1), kind: kindOf(tier), title: nameOf(tier) }));
    const end = request.ended_at_tokens === null ? request.reason : `at ${count(request.ended_at_tokens)}: ${why(request)}`;
    return row(COLUMNS, [
      clock(request.at), request.model, count(request.prompt_tokens),
      request.prompt_tokens === null ? "–" : share(cached, request.prompt_tokens),
      [bar(text || "nothing was cached", parts), make("small", {}, text)],
      seconds(request.ttft_s), end || "–",
      make("button", { type: "button", "aria-label": `Explain ${request.request_id}`, onclick: () => explain(request.request_id) }, "Explain"),
    ]);
  }

  close() {}
}

function why(request) {
  return WORDS[request.reason] || request.reason;
}

async function explain(requestId) {
  const content = make("div", {}, make("p", {}, "…"));
  const dialog = make("dialog", { "aria-labelledby": "explain-title", class: "wide" },
    make("h2", { id: "explain-title" }, requestId),
    content,
    make("form", { method: "dialog", class: "buttons" }, make("button", { autofocus: true }, "Close")));
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
  try {
    show(content, explanation(await get(`requests/${encodeURIComponent(requestId)}`)));
  } catch (error) {
    show(content, make("p", { role: "alert" }, error.message));
  }
}

function explanation(found) {
  const request = found.request;
  const rows = [];
  const add = (name, value) => rows.push(make("dt", {}, name), make("dd", {}, value));
  if (request) {
    add("Model", request.model);
    if (request.engine) add("Engine", request.engine);
    if (request.key) add("API key", request.key);
    if (request.prompt_tokens !== null) add("Prompt", `${count(request.prompt_tokens)} tokens`);
    if (request.output_tokens !== null) add("Answer", `${count(request.output_tokens)} tokens${request.finish_reason ? `, ended by ${request.finish_reason}` : ""}`);
    if (request.ttft_s !== null) add("First token", `after ${seconds(request.ttft_s)}`);
    for (const tier of inOrder(Object.keys(request.cached_tokens))) add(`From ${nameOf(tier)}`, `${count(request.cached_tokens[tier])} tokens`);
    if (request.reason) add("The match ended", `at token ${count(request.ended_at_tokens)}${request.tier ? `, in the ${nameOf(request.tier)} tier` : ""}: ${why(request)}${request.detail ? ` (${request.detail})` : ""}`);
  }
  const parts = [make("dl", {}, rows)];
  if (found.sentence) parts.push(make("p", {}, found.sentence));
  if (found.parting_sentence) parts.push(make("p", {}, found.parting_sentence));
  const parting = found.parting;
  if (parting && (parting.before || parting.recorded || parting.now)) {
    parts.push(make("div", { class: "parting" },
      make("h3", {}, "Around the place where it parts"),
      make("pre", {}, make("span", { class: "quiet" }, parting.before || ""), make("del", {}, parting.recorded || ""), make("ins", {}, parting.now || "")),
      make("p", { class: "quiet" }, "Struck out: what is cached. Underlined: what came now.")));
  }
  for (const sentence of found.advice || []) parts.push(make("p", { class: "advice" }, sentence));
  return parts;
}
