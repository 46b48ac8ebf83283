// Cached blocks by namespace and prefix, and the actions on them.

import { follow, get, hasPrefixes, mayChange, needsKey, send } from "./api.js";
import { ask, askText, bar, make, show, table, unseen } from "./dom.js";
import { ago, bytes, count, date, inOrder, kindOf, nameOf, share, sum } from "./format.js";

const LIMIT = 200;
const REFRESH_MS = 10000;

export class Prefixes {
  constructor(place, live) {
    this.live = live;
    this.tree = make("div");
    this.notice = make("p", { role: "status", class: "quiet" });
    this.warm = make("div");
    show(place,
      make("h2", {}, "Prefixes"),
      make("p", { class: "buttons" },
        make("button", { type: "button", onclick: () => this.load() }, "Refresh"),
        mayChange() && make("button", { type: "button", id: "warm-button", onclick: () => this.askForDocuments() }, "Warm a document")),
      this.notice, this.warm, this.tree);
    this.changes = live.state ? live.state.prefix_changes : undefined;
    this.numLoads = 0;
    this.timer = setInterval(() => this.load(), REFRESH_MS);
    this.load();
  }

  // Names and pins have changed: here, in another tab or by a command.
  update({ prefix_changes: changes }) {
    if (changes === this.changes) return;
    this.changes = changes;
    this.load();
  }

  async load() {
    this.numLoads += 1;
    const number = this.numLoads;
    try {
      const [{ namespaces, is_cut: spacesCut }, prefixes] = await Promise.all([get("namespaces"), this.prefixes()]);
      if (number !== this.numLoads) return; // a later answer is on its way
      this.showTree(namespaces, prefixes);
      if (spacesCut || prefixes.is_cut) this.notice.textContent = [
        prefixes.is_cut && `Only the first ${LIMIT} prefixes are shown, by name.`,
        spacesCut && "Only the largest namespaces are shown."].filter(Boolean).join(" ");
    } catch (error) {
      this.notice.textContent = error.message;
    }
  }

  async prefixes() {
    return hasPrefixes() ? get(`prefixes?limit=${LIMIT}`) : { prefixes: [], is_cut: false };
  }

  showTree(namespaces, { prefixes }) {
    const open = new Set([...this.tree.querySelectorAll("details[open]")].map((one) => one.dataset.namespace));
    const isFirst = this.tree.querySelector("details") === null;
    const known = new Map(namespaces.map((space) => [space.namespace, space]));
    for (const prefix of prefixes) {
      if (!known.has(prefix.namespace)) known.set(prefix.namespace, { namespace: prefix.namespace, name: "", models: [prefix.model], cache: "", blocks: 0, bytes: 0, disk_blocks: 0 });
    }
    const spaces = [...known.values()].map((space) => {
      const own = prefixes.filter((prefix) => prefix.namespace === space.namespace);
      const title = space.models.length ? space.models.join(", ") : space.name || "unknown model";
      const details = make("details", { open: isFirst || open.has(space.namespace), "data-namespace": space.namespace },
        make("summary", {},
          make("strong", {}, title), ` ${space.namespace.slice(0, 12)}`,
          space.tenant && ` of ${space.tenant}`,
          ` · ${count(space.blocks)} blocks in memory (${bytes(space.bytes)}), ${count(space.disk_blocks)} on disk`),
        own.length ? this.table(own) : make("p", { class: "quiet" }, hasPrefixes() ? "No prefix of this namespace has a name." : "This server keeps no names of prefixes."));
      return details;
    });
    const focused = this.tree.contains(document.activeElement) ? placeOf(document.activeElement) : null;
    show(this.tree, spaces.length ? spaces : make("p", { class: "quiet" }, "Nothing is cached yet."));
    if (focused !== null) [...this.tree.querySelectorAll("button, summary")].find((one) => placeOf(one) === focused)?.focus();
  }

  table(prefixes) {
    const columns = ["Name", "Tokens", "Blocks", "Size", "Tiers", "Last used", "Hits", "Kept", ""];
    return table(unseen("Prefixes"), columns, prefixes.map((prefix) => {
      const tiers = inOrder(Object.keys(prefix.bytes_by_tier || {}));
      const everywhere = sum(prefix.bytes_by_tier) || 1; // a block may be in several tiers
      const parts = tiers.map((tier) => ({ share: prefix.bytes_by_tier[tier] / everywhere, kind: kindOf(tier), title: nameOf(tier) }));
      const text = tiers.map((tier) => `${nameOf(tier)} ${share(prefix.bytes_by_tier[tier], prefix.bytes)}`).join(", ");
      const kept = prefix.is_pinned ? (prefix.expires_at ? `pinned until ${date(prefix.expires_at)}` : "pinned")
        : [prefix.pinned_blocks ? `${count(prefix.pinned_blocks)} of ${count(prefix.blocks)} blocks pinned` : "no",
          prefix.expires_at && `the name until ${date(prefix.expires_at)}`].filter(Boolean).join("; ");
      return [
        prefix.name === null ? make("em", {}, "everything") : [prefix.name, prefix.key && make("small", {}, ` of ${prefix.key}`)], count(prefix.tokens), count(prefix.blocks), bytes(prefix.bytes),
        [bar(text || "in no tier", parts), make("small", {}, text)], prefix.name === null ? "–" : ago(prefix.last_used), count(prefix.hits), prefix.name === null ? "–" : kept,
        mayChange() ? (prefix.name === null ? this.dropAll(prefix) : this.buttons(prefix)) : "",
      ];
    }));
  }

  buttons(prefix) {
    const path = `prefixes/${encodeURIComponent(prefix.name)}`;
    const button = (text, action) => make("button", { type: "button", "aria-label": `${text} ${prefix.name}`, onclick: action }, text);
    return make("span", { class: "buttons" },
      prefix.is_pinned ? "" : button("Pin", () => this.change(`${path}/pin`)),
      prefix.is_pinned || prefix.pinned_blocks ? button("Unpin", () => this.change(`${path}/unpin`)) : "",
      button("Rename", async () => {
        const name = await askText(`A new name for ${prefix.name}`, prefix.name, "Rename");
        if (name !== null) this.change(`${path}/rename`, { name });
      }),
      button("Drop", async () => {
        if (await ask(`Drop ${prefix.name}? Its blocks will be computed again when needed.`, "Drop")) this.change(`${path}/drop`);
      }));
  }

  dropAll({ namespace, model, blocks }) {
    const title = `${model || "namespace"} ${namespace.slice(0, 12)}`;
    return make("span", { class: "buttons" }, make("button", { type: "button", "aria-label": `Drop everything of ${title}`, onclick: async () => {
      const question = `Drop all ${count(blocks)} blocks of ${title}? Names stay, without blocks and pins: warm them again.`;
      if (await ask(question, "Drop")) this.change(`namespaces/${namespace}/drop`);
    } }, "Drop"));
  }

  async change(path, body = {}) {
    try {
      const { prefix } = await send("POST", path, body);
      const isPartial = path.endsWith("/pin") && prefix && !prefix.is_pinned;
      this.notice.textContent = !isPartial ? "Done."
        : `${count(prefix.pinned_blocks)} of ${count(prefix.blocks)} blocks of ${prefix.name} are pinned; the others are not cached: warm it again.`;
    } catch (error) {
      this.notice.textContent = error.message;
    }
    this.load();
  }

  askForDocuments() {
    const models = [...new Set((this.live.state ? this.live.state.engines : []).filter((engine) => engine.kind === "kvtier").map((engine) => engine.model))];
    const field = (label, element) => make("label", {}, label, element);
    const name = make("input", { name: "name", required: true, maxlength: 200 });
    const model = make("select", { name: "model" }, models.map((one) => make("option", { value: one }, one)));
    const key = make("input", { name: "key", maxlength: 256, placeholder: "your own" });
    const files = make("input", { type: "file", multiple: true });
    const text = make("textarea", { rows: 4 });
    const system = make("textarea", { rows: 2 });
    const pin = make("input", { type: "checkbox" });
    const days = make("input", { type: "number", min: 0, max: 3650, step: "any" });
    const force = make("input", { type: "checkbox" });
    const progress = make("progress", { max: 1, value: 0, hidden: true, "aria-label": "Tokens that are warm" });
    const said = make("p", { role: "status" });
    const submit = make("button", {}, "Warm");
    const form = make("form", { class: "warm", onsubmit: async (event) => {
      event.preventDefault();
      submit.disabled = true;
      progress.hidden = false;
      const documents = [...(await Promise.all([...files.files].map((file) => file.text()))), ...(text.value ? [text.value] : [])];
      const body = {
        name: name.value, model: model.value || null, key: key.value || null, documents, system: system.value || null, pin: pin.checked,
        ttl_s: days.value ? Number(days.value) * 86400 : null, force: force.checked,
      };
      try {
        await this.warmUp(body, progress, said);
      } catch (error) {
        said.textContent = error.message;
      }
      submit.disabled = false;
      this.load();
    } },
      field("Name", name), field("Model", model), needsKey() && field("For chats of the API key", key), field("Files", files), field("Or text", text), field("System prompt", system),
      field("Pin it", pin), field("Keep it for days", days), field("Even if it evicts other blocks", force),
      make("p", { class: "buttons" }, submit, make("button", { type: "button", onclick: () => show(this.warm) }, "Close")), progress, said);
    show(this.warm, form);
    name.focus();
  }

  async warmUp(body, progress, said) {
    let isWarm = false;
    await follow("prefixes", body, (event) => {
      if (event.error) throw new Error(event.error.message || event.error);
      if (event.all_tokens) {
        progress.value = event.done_tokens / event.all_tokens;
        said.textContent = `${count(event.done_tokens)} of ${count(event.all_tokens)} tokens`;
      }
      if (event.prefix) {
        isWarm = true;
        progress.value = 1;
        said.textContent = `${event.prefix.name} is warm: ${count(event.prefix.tokens)} tokens.`;
      }
    });
    if (!isWarm) throw new Error("The server stopped before it was done: what was computed stays cached.");
  }

  close() {
    clearInterval(this.timer);
  }
}

// Tells a button or a summary from others, in this tree and in the one that replaces it.
function placeOf(element) {
  return element.getAttribute("aria-label") || element.parentElement.dataset.namespace || "";
}
