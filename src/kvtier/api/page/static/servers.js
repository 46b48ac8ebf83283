// Engines, cache servers and their health; the last warnings of their logs.

import { get } from "./api.js";
import { make, show, table, unseen } from "./dom.js";
import { ago, clock, count, seconds } from "./format.js";

const REFRESH_MS = 10000;

export class Servers {
  constructor(place, live) {
    this.engines = make("div");
    this.caches = make("div");
    this.warnings = make("div");
    show(place,
      make("section", { "aria-labelledby": "engines-title" }, make("h2", { id: "engines-title" }, "Engines"), this.engines),
      make("section", { "aria-labelledby": "caches-title" }, make("h2", { id: "caches-title" }, "Cache servers"), this.caches),
      make("section", { "aria-labelledby": "warnings-title" }, make("h2", { id: "warnings-title" }, "Last warnings"), this.warnings));
    this.timer = setInterval(() => this.loadWarnings(), REFRESH_MS);
    this.loadWarnings();
    if (live.state) this.update(live.state);
  }

  update({ engines, caches }) {
    const health = (status) => make("strong", { class: status === "ready" ? "good" : "bad" }, status);
    const loads = (one) => (one.loading_off ? [make("strong", { class: "bad" }, "off"), `: ${one.loading_off}`] : one.kind === "kvtier" ? "on" : "–");
    const checks = (results) => Object.entries(results).map(([result, number]) => `${count(number)} ${result}`).join(", ") || "–";
    const rows = engines.map((one) => [
      one.name, one.model, one.kind, health(one.status), loads(one), checks(one.canary_checks), one.device || "–", count(one.running), count(one.waiting),
      one.since ? ago(one.since) : "–",
    ]);
    show(this.engines, rows.length
      ? table(unseen("Engines"), ["Name", "Model", "Kind", "Health", "Loads", "Canary", "Device", "Running", "Waiting", "Ready since"], rows)
      : make("p", { class: "quiet" }, "Engines connect to this server themselves."));
    const lost = (losses) => Object.entries(losses).map(([kind, number]) => `${kind} ${count(number)}`).join(", ") || "none";
    show(this.caches, caches.length
      ? table(unseen("Cache servers"), ["Name", "Address", "Health", "Up for", "Clients", "Leases", "Blocks", "Hit", "Missed", "Evicted", "Losses"],
        caches.map((one) => [
          one.name, one.address, health(one.status), seconds(one.uptime_s), count(one.clients), count(one.leases), count(one.blocks),
          count(one.hit_blocks), count(one.missed_blocks), count(one.evicted_blocks), lost(one.losses),
        ]))
      : make("p", { class: "quiet" }, "This deployment has no cache server of its own."));
  }

  async loadWarnings() {
    try {
      const { warnings } = await get("warnings");
      show(this.warnings, warnings.length
        ? make("ol", { class: "log" }, warnings.map((one) => make("li", {},
          make("time", { datetime: new Date(one.at * 1000).toISOString() }, clock(one.at)), " ",
          make("strong", { class: one.level === "error" ? "bad" : "warn" }, one.level), ` ${one.source}: `, one.text)))
        : make("p", { class: "quiet" }, "There are none."));
    } catch (error) {
      show(this.warnings, make("p", { role: "alert" }, error.message));
    }
  }

  close() {
    clearInterval(this.timer);
  }
}
