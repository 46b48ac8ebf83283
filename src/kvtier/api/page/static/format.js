// Formats numbers for people. An unknown value is a dash. No line break separates a number from its unit.

const DASH = "–";
const GAP = "\u00a0";

export function bytes(value) {
  if (value === null || value === undefined) return DASH;
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let place = 0;
  let left = value;
  while (left >= 1024 && place < units.length - 1) {
    left /= 1024;
    place += 1;
  }
  return `${place && left < 100 ? left.toFixed(1) : Math.round(left)}${GAP}${units[place]}`;
}

export function rate(value) {
  return value === null || value === undefined ? DASH : `${bytes(value)}/s`;
}

export function count(value) {
  return value === null || value === undefined ? DASH : Math.round(value).toLocaleString("en");
}

export function share(part, whole) {
  return whole ? `${((100 * part) / whole).toFixed(part < whole && part > 0 ? 1 : 0)}%` : DASH;
}

export function seconds(value) {
  if (value === null || value === undefined) return DASH;
  if (value === 0) return `0${GAP}s`;
  if (value < 0.001) return `${(value * 1e6).toFixed(0)}${GAP}µs`;
  if (value < 1) return `${(value * 1000).toFixed(value < 0.01 ? 1 : 0)}${GAP}ms`;
  if (value < 120) return `${value.toFixed(1)}${GAP}s`;
  if (value < 7200) return `${(value / 60).toFixed(1)}${GAP}min`;
  if (value < 172800) return `${(value / 3600).toFixed(1)}${GAP}h`;
  return `${(value / 86400).toFixed(1)}${GAP}days`;
}

export function clock(at) {
  return at === null || at === undefined ? DASH : new Date(at * 1000).toLocaleTimeString().replace(/\s/g, GAP);
}

export function date(at) {
  return new Date(at * 1000).toLocaleString([], { dateStyle: "short", timeStyle: "short" }).replace(/\s(?=[AP]M)/g, GAP);
}

export function ago(at) {
  return at === null || at === undefined ? "never" : `${seconds(Math.max(0, Date.now() / 1000 - at))}${GAP}ago`;
}

export function money(value, currency) {
  return value === null || value === undefined ? DASH : `${currency}${GAP}${value.toFixed(value < 10 ? 4 : 2)}`;
}

export function sum(counts) {
  return Object.values(counts || {}).reduce((total, one) => total + one, 0);
}

// Tiers from fast to slow; unknown ones after them, by name.
const ORDER = ["device", "host", "server", "memory", "disk", "mooncake", "cluster", "objects"];

export function inOrder(tiers) {
  const rank = (name) => (ORDER.indexOf(name) < 0 ? ORDER.length : ORDER.indexOf(name));
  return [...tiers].sort((a, b) => rank(a) - rank(b) || a.localeCompare(b));
}

// The memory of a cache server is the tier "server" of its engines.
export function nameOf(tier) {
  return tier === "server" ? "memory" : tier;
}

export function kindOf(tier) {
  const place = ORDER.indexOf(tier);
  return place < 0 ? "tier-other" : `tier-${tier}`;
}
