// Formats numbers for people. An unknown value is a dash.

const DASH = "–";

export function bytes(value) {
  if (value === null || value === undefined) return DASH;
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let place = 0;
  let left = value;
  while (left >= 1024 && place < units.length - 1) {
    left /= 1024;
    place += 1;
  }
  return `${place && left < 100 ? left.toFixed(1) : Math.round(left)} ${units[place]}`;
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
  if (value < 0.001) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 1) return `${(value * 1000).toFixed(value < 0.01 ? 1 : 0)} ms`;
  if (value < 120) return `${value.toFixed(1)} s`;
  if (value < 7200) return `${(value / 60).toFixed(1)} min`;
  if (value < 172800) return `${(value / 3600).toFixed(1)} h`;
  return `${(value / 86400).toFixed(1)} days`;
}

export function clock(at) {
  return at === null || at === undefined ? DASH : new Date(at * 1000).toLocaleTimeString();
}

export function ago(at) {
  return at === null || at === undefined ? "never" : `${seconds(Math.max(0, Date.now() / 1000 - at))} ago`;
}

export function money(value, currency) {
  return value === null || value === undefined ? DASH : `${currency} ${value.toFixed(value < 10 ? 4 : 2)}`;
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

export function kindOf(tier) {
  const place = ORDER.indexOf(tier);
  return place < 0 ? "tier-other" : `tier-${tier}`;
}
