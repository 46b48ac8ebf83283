// Requests to this page's server.

let session = null;

export async function openSession() {
  session = await get("session");
  return session;
}

export function mayChange() {
  return session !== null && session.may_change;
}

export function hasPrefixes() {
  return session !== null && session.has_prefixes;
}

export function needsKey() {
  return session !== null && session.needs_key;
}

export async function get(path) {
  const response = await fetch(`/kvtier/v1/${path}`, { headers: { accept: "application/json" } });
  return read(response);
}

export async function send(method, path, body) {
  const response = await request(method, path, body);
  return read(response);
}

// A request with a stream of server-sent events as its answer; each event is passed on as it arrives.
export async function follow(path, body, tell) {
  const response = await request("POST", path, body);
  if (!response.ok) return read(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return null;
    text += value;
    for (let end = text.indexOf("\n\n"); end >= 0; end = text.indexOf("\n\n")) {
      const data = text.slice(0, end).split("\n").filter((line) => line.startsWith("data:"));
      text = text.slice(end + 2);
      if (data.length) tell(JSON.parse(data.map((line) => line.slice(5)).join("\n")));
    }
  }
}

// A server that has been started again has another csrf: it is asked for, once.
async function request(method, path, body) {
  const response = await sendOnce(method, path, body);
  if (response.status !== 403) return response;
  const found = await response.clone().json().catch(() => ({}));
  if (!found.error || found.error.code !== "wrong_csrf") return response;
  await openSession();
  return sendOnce(method, path, body);
}

function sendOnce(method, path, body) {
  const headers = { "content-type": "application/json", "x-kvtier-csrf": (session && session.csrf) || "" };
  return fetch(`/kvtier/v1/${path}`, { method, headers, body: body === undefined ? undefined : JSON.stringify(body) });
}

async function read(response) {
  const found = await response.json().catch(() => ({}));
  if (response.ok) return found;
  if (response.status === 401 && session !== null && session.needs_key) location.reload();
  const error = new Error((found.error && (found.error.message || found.error)) || `the server answered ${response.status}`);
  error.status = response.status;
  throw error;
}
