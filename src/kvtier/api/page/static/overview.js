// The fill levels of tiers, their hits, and the savings.

import { get } from "./api.js";
import { Chart } from "./charts.js";
import { bar, make, show, table } from "./dom.js";
import { bytes, count, inOrder, kindOf, money, nameOf, rate, seconds, share, sum } from "./format.js";

const MAX_MOVES = 150;
const REFRESH_MS = 10000;

export class Overview {
  constructor(place, live) {
    this.live = live;
    this.span = "hour";
    this.alarms = make("div", { role: "alert" });
    this.alarmed = "";
    this.cards = make("section", { class: "cards", "aria-label": "Summary" });
    this.tiers = make("div");
    this.hits = new Chart("Cached share of prompt tokens, by tier", { format: (value) => `${Math.round(value)}%`, isStacked: true });
    this.moves = new Chart("Bytes per second, in and out of the tiers", { format: rate });
    this.curve = new Chart("Hits of the cache server with other memory sizes, from live traffic",
      { format: (value) => `${Math.round(value * 100)}%`, x: "size", formatX: (value) => bytes(2 ** value) });
    this.curve.element.hidden = true;
    this.shares = make("div");
    show(place,
      this.alarms,
      this.cards,
      make("section", { "aria-labelledby": "tiers-title" }, make("h2", { id: "tiers-title" }, "Tiers"), this.tiers),
      make("section", { "aria-labelledby": "hits-title" },
        make("h2", { id: "hits-title" }, "Hits"), this.spans(), this.hits.element, this.shares),
      make("section", { "aria-labelledby": "moves-title" }, make("h2", { id: "moves-title" }, "Traffic"), this.moves.element),
      this.curve.element);
    this.timer = setInterval(() => this.loadHistory(), REFRESH_MS);
    this.loadHistory();
    if (live.state) this.update(live.state);
  }

  spans() {
    const buttons = ["hour", "day"].map((span) => make("button", {
      type: "button", "aria-pressed": String(span === this.span), onclick: () => {
        this.span = span;
        buttons.forEach((one) => one.setAttribute("aria-pressed", String(one.textContent === `Last ${span}`)));
        this.loadHistory();
      },
    }, `Last ${span}`));
    return make("p", { class: "buttons", role: "group", "aria-label": "Time shown" }, buttons);
  }

  async loadHistory() {
    try {
      const { steps, step_s: length } = await get(`history?span=${this.span}`);
      this.showHistory(steps, length);
    } catch {
      // the next attempt may succeed
    }
  }

  showHistory(steps, length) {
    const tiers = inOrder(new Set(steps.flatMap((step) => Object.keys(step.cached))));
    const points = withGaps(steps, length);
    const columns = [points.map(({ at }) => at)];
    for (const tier of tiers) {
      columns.push(points.map(({ step }) => (step && step.prompt ? (100 * (step.cached[tier] || 0)) / step.prompt : null)));
    }
    const prompt = steps.reduce((total, step) => total + step.prompt, 0);
    const cached = steps.reduce((total, step) => total + sum(step.cached), 0);
    const sentence = prompt
      ? `${share(cached, prompt)} of ${count(prompt)} prompt tokens in the last ${this.span} came from the cache.`
      : `No request ended in the last ${this.span}.`;
    if (tiers.length) this.hits.set(tiers.map((tier) => ({ label: nameOf(tier), kind: kindOf(tier) })), columns, sentence);
    else this.hits.clear(sentence);
  }

  update(state) {
    this.showAlarms(state.engines);
    this.showCards(state);
    this.showTiers(state.tiers);
    this.showShares(state.tokens);
    this.showMoves();
    this.showCurve(state);
  }

  // Changed only if the text differs, so that screen readers read it once.
  showAlarms(engines) {
    const sentences = engines.filter((one) => one.loading_off).map((one) => `${one.name} loads nothing from its tiers: ${one.loading_off}`);
    if (sentences.join("\n") === this.alarmed) return;
    this.alarmed = sentences.join("\n");
    show(this.alarms, sentences.map((sentence) => make("p", { class: "alarm" }, sentence)));
  }

  showCards({ tokens, saved, num_requests: underWay, kind, caches }) {
    const card = (title, value, note) => make("div", { class: "card" }, make("h3", {}, title), make("p", { class: "value" }, value), make("p", { class: "quiet" }, note));
    const recent = tokens["5m"];
    show(this.cards,
      card("Cached, last 5 minutes", share(sum(recent.cached), recent.prompt), `of ${count(recent.prompt)} prompt tokens`),
      card("Cached, last hour", share(sum(tokens["1h"].cached), tokens["1h"].prompt), `of ${count(tokens["1h"].prompt)} prompt tokens`),
      ...(kind === "cache-server" ? caches.map((one) => card("Blocks found", share(one.hit_blocks, one.hit_blocks + one.missed_blocks), `of ${count(one.hit_blocks + one.missed_blocks)} that clients asked for since the start`)) : []),
      kind === "deployment" && card("GPU time saved", seconds(saved.gpu_s), saved.unvalued_tokens
        ? `without ${count(saved.unvalued_tokens)} cached tokens of engines whose speed is not measured yet`
        : "by the measured speed, since the engines started"),
      saved.money !== null && card("Money saved", money(saved.money, saved.currency), "at the price that the file gives"),
      underWay !== null && card("Requests in flight", count(underWay), `${count(tokens.all.requests)} answered so far`));
  }

  showTiers(tiers) {
    const rows = tiers.map((tier) => {
      const room = tier.room_bytes || 0;
      const used = tier.used_bytes || 0;
      const pinned = Math.min(used, tier.pinned_bytes || 0);
      const leased = Math.min(used - pinned, tier.leased_bytes || 0);
      const label = `${bytes(used)} of ${bytes(tier.room_bytes)} used`;
      const level = room ? bar(label, [
        { share: pinned / room, kind: "pinned", title: `pinned: ${bytes(pinned)}` },
        { share: leased / room, kind: "leased", title: `leased: ${bytes(leased)}` },
        { share: (used - pinned - leased) / room, kind: "used", title: `other: ${bytes(used - pinned - leased)}` },
      ]) : "";
      return [
        make("strong", { class: kindOf(tier.name) }, tier.name), tier.owner, tier.is_up ? level : make("strong", { class: "bad" }, "away"),
        bytes(tier.room_bytes), bytes(tier.used_bytes), bytes(tier.pinned_bytes), bytes(tier.leased_bytes),
        count(tier.blocks), rate(tier.in_bytes_per_s), rate(tier.out_bytes_per_s),
      ];
    });
    const columns = ["Tier", "Of", "Level", "Room", "Used", "Pinned", "Leased", "Blocks", "In", "Out"];
    const key = (kind, name) => make("span", { class: "key" }, make("span", { class: `part ${kind}` }), name);
    show(this.tiers, table(["What is in which tier", key("pinned", "pinned"), key("leased", "leased"), key("used", "other")], columns, rows));
  }

  showShares(tokens) {
    const names = { "5m": "5 minutes", "1h": "hour", "24h": "day", all: "all since the start" };
    const tiers = inOrder(new Set(Object.values(tokens).flatMap((one) => Object.keys(one.cached))));
    const rows = Object.entries(names).map(([span, name]) => {
      const one = tokens[span];
      return [name, count(one.requests), count(one.prompt), ...tiers.map((tier) => share(one.cached[tier] || 0, one.prompt)), share(sum(one.cached), one.prompt)];
    });
    show(this.shares, table("Share of prompt tokens by the tier they came from", ["Over the last", "Requests", "Prompt tokens", ...tiers.map(nameOf), "Cached"], rows));
  }

  showMoves() {
    const moves = this.live.moves.slice(-MAX_MOVES);
    const tiers = inOrder(new Set(moves.flatMap((one) => Object.keys(one.rates))));
    if (!tiers.length) {
      this.moves.note.textContent = "Nothing has moved since this page was opened.";
      return;
    }
    const series = tiers.flatMap((tier) => [{ label: `${tier} in`, kind: kindOf(tier), isDashed: true }, { label: `${tier} out`, kind: kindOf(tier) }]);
    const columns = [moves.map((one) => one.at)];
    for (const tier of tiers) {
      columns.push(moves.map((one) => (one.rates[tier] ? one.rates[tier][0] : null)));
      columns.push(moves.map((one) => (one.rates[tier] ? one.rates[tier][1] : null)));
    }
    const last = moves[moves.length - 1].rates;
    const sentence = tiers.map((tier) => `${tier}: ${rate(last[tier]?.[0])} in, ${rate(last[tier]?.[1])} out`).join("; ");
    this.moves.set(series, columns, `Now ${sentence}.`);
  }

  showCurve({ curves, tiers }) {
    const points = curves.length ? curves[0].points.filter(([size]) => size >= 1) : [];
    this.curve.element.hidden = points.length < 2;
    if (points.length < 2) return;
    const { cache } = curves[0];
    const room = tiers.find((tier) => tier.name === "memory" && tier.owner === cache)?.room_bytes;
    const [most, best] = points[points.length - 1];
    const present = room ? `${share(partAt(points, room), 1)} with its ${bytes(room)} and ` : "";
    this.curve.set([{ label: "hits", kind: "tier-memory" }],
      [points.map(([size]) => Math.log2(size)), points.map(([, part]) => part)],
      `Of the tokens that engines asked ${cache} for, its memory alone would have had ${present}${share(best, 1)} with ${bytes(most)}.`);
  }

  close() {
    clearInterval(this.timer);
    this.hits.close();
    this.moves.close();
    this.curve.close();
  }
}

// Each step from its beginning to its end, and a gap behind it unless another one follows: no line bridges idle times.
function withGaps(steps, length) {
  return steps.flatMap((step, place) => {
    const end = step.at + 0.99 * length;
    const isLast = place + 1 === steps.length || steps[place + 1].at > step.at + 1.5 * length;
    return [{ at: step.at, step }, { at: end, step }, ...(isLast ? [{ at: step.at + length, step: null }] : [])];
  });
}

// The share at a size between two points.
function partAt(points, size) {
  const after = points.findIndex(([one]) => one >= size);
  if (after < 0) return points[points.length - 1][1];
  if (after === 0) return points[0][1];
  const [[low, less], [high, more]] = [points[after - 1], points[after]];
  return less + ((more - less) * (size - low)) / (high - low);
}
