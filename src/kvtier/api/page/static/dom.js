// Makes elements from names and text. Foreign text becomes text nodes only: nothing is parsed as HTML.

export function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (key === "onclick" || key === "onsubmit" || key === "onchange" || key === "oninput") {
      element.addEventListener(key.slice(2), value);
    } else if (value === true) {
      element.setAttribute(key, "");
    } else {
      element.setAttribute(key, String(value));
    }
  }
  fill(element, children);
  return element;
}

function fill(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

export function show(element, ...children) {
  element.replaceChildren();
  fill(element, children);
}

// Columns of names and sentences from elsewhere, which may be one long word; words of the others are not broken.
const FOREIGN = new Set(["Name", "Model", "Of", "Address", "Loads", "The match ended"]);

// A table whose cells carry their column's name, so that a narrow screen can show rows as cards.
export function table(caption, columns, rows) {
  const head = make("tr", {}, columns.map((name) => make("th", { scope: "col" }, name)));
  return make(
    "table", {},
    make("caption", {}, caption),
    make("thead", {}, head),
    make("tbody", {}, rows.map((cells) => row(columns, cells))),
  );
}

export function row(columns, cells) {
  return make("tr", {}, cells.map((cell, place) => make(
    "td", { "data-label": columns[place], class: FOREIGN.has(columns[place]) && "foreign" },
    Array.isArray(cell) ? make("div", {}, cell) : cell)));
}

// A caption for those who do not see the heading above the table, which says the same.
export function unseen(text) {
  return make("span", { class: "unseen" }, text);
}

// A bar of parts, each a share of the whole from 0 to 1 with a class for its colour.
export function bar(label, parts) {
  const found = make("div", { class: "bar", role: "img", "aria-label": label });
  for (const { share, kind, title } of parts) {
    const part = make("span", { class: `part ${kind}`, title });
    part.style.width = `${Math.min(100, Math.max(0, share * 100))}%`;
    found.append(part);
  }
  return found;
}

export async function ask(question, action) {
  const dialog = make(
    "dialog", { "aria-label": question },
    make("p", {}, question),
    make("form", { method: "dialog", class: "buttons" },
      make("button", { value: "yes", class: "danger" }, action),
      make("button", { value: "no", autofocus: true }, "Cancel")),
  );
  document.body.append(dialog);
  dialog.showModal();
  const answer = await new Promise((done) => dialog.addEventListener("close", () => done(dialog.returnValue)));
  dialog.remove();
  return answer === "yes";
}

export async function askText(question, value, action) {
  const input = make("input", { name: "text", required: true, maxlength: 200, value, "aria-label": question });
  const dialog = make(
    "dialog", { "aria-label": question },
    make("form", { method: "dialog" },
      make("p", {}, question),
      input,
      make("p", { class: "buttons" },
        make("button", { value: "yes" }, action),
        make("button", { value: "no", formnovalidate: true }, "Cancel"))),
  );
  document.body.append(dialog);
  dialog.showModal();
  input.select();
  const answer = await new Promise((done) => dialog.addEventListener("close", () => done(dialog.returnValue)));
  dialog.remove();
  return answer === "yes" ? input.value : null;
}
