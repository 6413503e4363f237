// The editor of one item's sheet: mark texts, describe patterns, hand in.
//
// Every change is saved with the version it started from. A save is repeated until it is answered;
// the server takes the same sheet twice as one. If a newer version stands, the page shows it, to
// take or to overwrite. What is not acknowledged yet also lies in localStorage, for a reload.

const COLORS = 9;
const MOST_PATTERNS = 30;
const SOON = 300; // milliseconds after the last change before it is saved
const PATIENCE = 10_000; // milliseconds to wait for an answer
const LONGEST = 8_000; // milliseconds between two attempts

const by = (name) => document.getElementById(name);
const color = (number) => `c${((number - 1) % COLORS) + 1}`;
const plural = (n) => `${n} text${n === 1 ? "" : "s"}`;
const ascending = (marks) => [...new Set(marks)].sort((a, b) => a - b);
const copy = ({ patterns, no_pattern, related, note, done }) => ({
  patterns: patterns.map(({ id, description, kind, marks }) => ({ id, description, kind, marks: ascending(marks) })),
  no_pattern,
  related,
  note,
  done,
});
const same = (one, other) => JSON.stringify(copy(one)) === JSON.stringify(copy(other));
const sleep = (time) => new Promise((resolve) => setTimeout(resolve, time));

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

const { dataset } = by("sheet");
const rows = [...document.querySelectorAll("#texts > li")];
const isComposition = !rows.length;
const radios = [...document.querySelectorAll("input[name=related]")];

let { version, sheet, problems } = JSON.parse(dataset.state);
let saved = copy(sheet); // what the server has
let sending = null; // what is on its way
let newer = null; // the version that we are in conflict with
let refused = false; // whether the server did not take the sheet as it is
let active = sheet.patterns[0]?.id ?? null; // the pattern that marks
let current = 0; // the row that keys act on

const find = (id) => sheet.patterns.find((pattern) => pattern.id === id);

// ---- saving --------------------------------------------------------------------------------------

const draftKey = `ffmem-draft:${dataset.person}:${dataset.key}`;
let draft = null;
let timer;

// Keeps what is not acknowledged; storage may be forbidden or full.
function keepDraft() {
  try {
    if (!same(sheet, saved)) localStorage.setItem(draftKey, (draft = JSON.stringify({ version, sending, sheet })));
    else if (localStorage.getItem(draftKey) === draft) localStorage.removeItem(draftKey); // not another window's
  } catch {
    draft = null;
  }
}

// Goes on where a page of this item was left with unsaved work.
function restoreDraft() {
  let left = null;
  try {
    draft = localStorage.getItem(draftKey);
    left = JSON.parse(draft);
  } catch {
    // Then there is nothing to restore.
  }
  if (!left || same(left.sheet, sheet)) return keepDraft();
  const isOurs = left.version === version || (left.sending && same(left.sending, sheet));
  if (!isOurs) newer = { version, sheet: copy(sheet), problems };
  sheet = left.sheet;
  active = sheet.patterns[0]?.id ?? null;
  if (!newer) save();
}

async function post(body) {
  const answer = await fetch(dataset.api, {
    method: "POST",
    headers: { "content-type": "application/json", "x-ffmem": "annotate" },
    body,
    signal: AbortSignal.timeout(PATIENCE),
    keepalive: body.length < 15_000, // it outlives the page; browsers allow 64 KiB
  });
  return { status: answer.status, content: await answer.json() };
}

async function save() {
  clearTimeout(timer);
  if (sending || newer || refused || same(sheet, saved)) return;
  sending = copy(sheet);
  keepDraft();
  const body = JSON.stringify({ base: version, sheet: sending });
  let answer = null;
  for (let wait = 500; !answer; wait = Math.min(2 * wait, LONGEST)) {
    showState("saving", "Saving …");
    try {
      answer = await post(body);
    } catch {
      // The connection or the server is gone.
    }
    if (answer?.status >= 500) answer = null;
    if (!answer) {
      showState("lost", "Not saved: no answer from the server, trying again. Keep this page open.");
      await sleep(wait);
    }
  }
  const { status, content } = answer;
  const sent = sending;
  sending = null;
  if (status === 200) {
    version = content.version;
    problems = content.problems;
    saved = sent;
    showState("saved", `Saved ${new Date().toTimeString().slice(0, 5)}`);
    keepDraft();
    if (sent.done && same(sheet, sent)) return leave(content.next);
    render();
    return save();
  }
  if (status === 409) {
    newer = content;
    setTimeout(() => by("conflict").scrollIntoView({ block: "nearest" }));
  } else {
    refused = true;
    sheet.done = saved.done;
    showState("refused", `Not saved: ${content.error}`);
  }
  keepDraft();
  return render();
}

// Opens the next item, or the list of them.
function leave(next) {
  const to = new URL(dataset.items, location);
  if (next) to.pathname += `/${next}`;
  location.assign(to);
}

// Takes a version from elsewhere.
function adopt(content) {
  ({ version, problems } = content);
  saved = content.sheet;
  sheet = copy(saved);
  newer = null;
  undone.length = past.length = 0;
  showState("saved", "This is the newest version");
  keepDraft();
  render();
}

// Looks whether somebody else has saved the sheet.
async function refresh() {
  if (document.hidden || sending || newer || !same(sheet, saved)) return;
  try {
    const answer = await fetch(dataset.api, { signal: AbortSignal.timeout(PATIENCE) });
    const content = await answer.json();
    if (answer.ok && content.version > version && !sending && same(sheet, saved)) adopt(content);
  } catch {
    // The next save will tell.
  }
}

document.addEventListener("visibilitychange", () => (document.hidden ? save() : refresh()));
addEventListener("pageshow", (event) => event.persisted && location.reload());
if ("shared" in dataset) setInterval(refresh, 3_000); // adjudicators see each other's work soon

// ---- changing ------------------------------------------------------------------------------------

const past = [];
const undone = [];
let field = null; // typing in one field is undone as a whole

function change(make, typing = null) {
  if (newer) return;
  const before = copy(sheet);
  make(sheet);
  if (same(before, sheet)) return;
  if (!typing || typing !== field) past.push(before);
  field = typing;
  undone.length = 0;
  changed();
}

function changed() {
  refused = false;
  keepDraft();
  render();
  if (!sending) showState("changed", "Saving …");
  clearTimeout(timer);
  timer = setTimeout(save, SOON);
}

function step(from, to) {
  if (newer || !from.length) return;
  to.push(copy(sheet));
  sheet = from.pop();
  field = null;
  changed();
}

function addPattern() {
  const id = `p-${[...crypto.getRandomValues(new Uint8Array(9))].map((byte) => byte.toString(16).padStart(2, "0")).join("")}`;
  if (sheet.done || newer || sheet.patterns.length >= MOST_PATTERNS) return false;
  active = id;
  change(() => {
    sheet.patterns.push({ id, description: "", kind: null, marks: [] });
    sheet.no_pattern = false;
  });
  return true;
}

function newPattern() {
  if (addPattern()) by("patterns").querySelector(".active textarea").focus();
}

const isMarked = (rank) => Boolean(find(active)?.marks.includes(rank));

function mark(rank, on) {
  if (sheet.done || (!find(active) && !addPattern())) return;
  change(() => {
    const pattern = find(active);
    pattern.marks = on ? ascending([...pattern.marks, rank]) : pattern.marks.filter((one) => one !== rank);
  });
}

function setKind(id, kind) {
  if (find(id) && !sheet.done) change(() => (find(id).kind = kind));
}

function select(id) {
  if (active === id) return;
  active = id;
  render();
}

function take(button) {
  const offered = JSON.parse(button.dataset.patterns);
  change(() => {
    for (const pattern of offered) if (!find(pattern.id)) sheet.patterns.push(pattern);
    if (button.dataset.none === "true") sheet.no_pattern = true;
  });
  if (offered.length) select(offered[0].id);
}

async function handIn() {
  while (sending || (!newer && !refused && !same(sheet, saved))) {
    save();
    await sleep(50);
  }
  if (newer || refused || sheet.done) return;
  by("problems").classList.toggle("asked", problems.length > 0);
  if (problems.length) by("problems").scrollIntoView({ block: "nearest" });
  else change(() => (sheet.done = true));
}

// ---- showing -------------------------------------------------------------------------------------

function showState(kind, text) {
  by("state").className = `small ${kind}`;
  by("state").textContent = text;
}

function render() {
  if (!find(active)) active = sheet.patterns[0]?.id ?? null;
  const locked = sheet.done || Boolean(newer);
  by("sheet").classList.toggle("locked", locked);
  by("done").hidden = !sheet.done;
  by("hand-in").hidden = sheet.done;
  by("problems").replaceChildren(...problems.map((text) => element("li", {}, text)));
  by("problems").hidden = sheet.done || !problems.length;
  by("undo").disabled = Boolean(newer) || !past.length;
  by("redo").disabled = Boolean(newer) || !undone.length;
  if (by("note").value !== sheet.note) by("note").value = sheet.note;
  by("note").disabled = locked;
  renderConflict();
  for (const button of document.querySelectorAll("button.take")) {
    const offered = JSON.parse(button.dataset.patterns);
    button.disabled = locked || (offered.every((one) => find(one.id)) && (button.dataset.none !== "true" || sheet.no_pattern));
  }
  for (const radio of radios) {
    radio.checked = sheet.related === (radio.value === "yes");
    radio.disabled = locked;
  }
  if (isComposition) return;
  by("none").checked = sheet.no_pattern;
  by("none").disabled = by("add").disabled = locked;
  renderPatterns(locked);
  renderRows(locked);
}

function renderConflict() {
  by("conflict").hidden = !newer;
  if (!newer) return;
  const { patterns, no_pattern, related, note, done } = newer.sheet;
  const lines = patterns.map((one, at) => `${at + 1}. ${one.description || "no description"} (${one.kind ?? "no kind"}): texts ${one.marks.join(", ") || "none"}`);
  if (no_pattern) lines.push("No pattern here");
  if (related !== null) lines.push(related ? "Related" : "Distant");
  if (note) lines.push(`Note: ${note}`);
  lines.push(done ? "Handed in" : "Not handed in");
  by("newer").replaceChildren(element("p", {}, `Version ${newer.version}:`), ...lines.map((line) => element("p", { class: "small", dir: "auto" }, line)));
  showState("refused", "Not saved: a newer version exists");
}

function numberButton(id, number) {
  const title = `Mark with pattern ${number}`;
  return element("button", { type: "button", class: `num ${color(number)}`, "aria-pressed": String(id === active), "aria-label": title, title, onclick: () => select(id) }, String(number));
}

function renderPatterns(locked) {
  const cards = new Map([...by("patterns").children].map((card) => [card.dataset.id, card]));
  sheet.patterns.forEach((pattern, at) => {
    const card = cards.get(pattern.id) ?? makeCard(pattern.id);
    cards.delete(pattern.id);
    showCard(card, pattern, at + 1, locked);
    if (by("patterns").children[at] !== card) by("patterns").insertBefore(card, by("patterns").children[at] ?? null);
  });
  for (const card of cards.values()) card.remove();
  const plus = element("button", { type: "button", class: "small", onclick: newPattern }, "+");
  by("strip").replaceChildren(...sheet.patterns.map((pattern, at) => numberButton(pattern.id, at + 1)), ...(locked ? [] : [plus]));
}

function makeCard(id) {
  const text = element("textarea", { rows: "2", maxlength: "500", dir: "auto", placeholder: "What do the texts share?" });
  text.addEventListener("input", () => change(() => (find(id).description = text.value), id));
  text.addEventListener("focus", () => select(id));
  text.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.ctrlKey || event.isComposing) return;
    event.preventDefault();
    focusRow(current);
  });
  const kinds = ["shallow", "semantic"].map((kind) => element("button", { type: "button", "data-kind": kind, onclick: () => setKind(id, kind) }, kind));
  const remove = () => change(() => (sheet.patterns = sheet.patterns.filter((one) => one.id !== id)));
  const card = element(
    "div",
    { "data-id": id, role: "group" },
    element("span", { class: "slot" }),
    text,
    element("span", { class: "kinds", role: "group", "aria-label": "Kind" }, ...kinds),
    element("span", { class: "count" }),
    element("button", { type: "button", class: "remove quiet", title: "Remove this pattern", onclick: remove }, "✕"),
  );
  card.addEventListener("mousedown", () => select(id));
  return card;
}

function showCard(card, pattern, number, locked) {
  card.className = `pat ${color(number)}${pattern.id === active ? " active" : ""}`;
  card.setAttribute("aria-label", `Pattern ${number}`);
  card.querySelector(".slot").replaceChildren(numberButton(pattern.id, number));
  const text = card.querySelector("textarea");
  text.setAttribute("aria-label", `What the texts of pattern ${number} share`);
  if (text.value !== pattern.description) text.value = pattern.description;
  text.disabled = locked;
  for (const button of card.querySelectorAll("[data-kind]")) {
    button.setAttribute("aria-pressed", String(button.dataset.kind === pattern.kind));
    button.disabled = locked;
  }
  card.querySelector(".count").textContent = plural(pattern.marks.length);
  card.querySelector(".remove").setAttribute("aria-label", `Remove pattern ${number}`);
  card.querySelector(".remove").hidden = locked;
}

function renderRows(locked) {
  const selected = sheet.patterns.findIndex((pattern) => pattern.id === active) + 1;
  by("texts").setAttribute("aria-label", selected ? `Texts; those selected show pattern ${selected}` : "Texts");
  rows.forEach((row, at) => {
    const numbers = sheet.patterns.flatMap((pattern, index) => (pattern.marks.includes(at + 1) ? [index + 1] : []));
    const marked = numbers.includes(selected);
    row.setAttribute("aria-selected", String(marked));
    row.setAttribute("aria-disabled", String(locked));
    row.className = marked ? `marked ${color(selected)}` : "";
    row.tabIndex = at === current ? 0 : -1;
    const chips = numbers.map((number) => element("span", { class: `num ${color(number)}` }, String(number)));
    row.querySelector(".marks").replaceChildren(...(numbers.length ? [element("span", { class: "hide" }, " Patterns: ")] : []), ...chips);
  });
}

// ---- mouse and fields ----------------------------------------------------------------------------

function focusRow(at) {
  if (!rows.length) return;
  current = Math.max(0, Math.min(rows.length - 1, at));
  rows[current].focus({ preventScroll: true });
  rows[current].scrollIntoView({ block: "nearest" });
}

let painting = null; // what a drag does: mark, unmark, or nothing
rows.forEach((row, at) => {
  row.addEventListener("mousedown", (event) => {
    if (event.button || sheet.done || newer) return;
    event.preventDefault(); // select no text
    painting = !isMarked(at + 1);
    mark(at + 1, painting);
    current = at;
    row.focus({ preventScroll: true });
  });
  row.addEventListener("mouseenter", (event) => painting !== null && event.buttons & 1 && mark(at + 1, painting));
  // The click of a screen reader comes without a mouse.
  row.addEventListener("click", (event) => event.detail === 0 && mark(at + 1, !isMarked(at + 1)));
  row.addEventListener("focus", () => {
    current = at;
    rows.forEach((other, place) => (other.tabIndex = place === at ? 0 : -1));
  });
});
addEventListener("mouseup", () => (painting = null));

const answer = (related) => !sheet.done && change(() => (sheet.related = related));
for (const radio of radios) radio.addEventListener("change", () => answer(radio.value === "yes"));
by("add")?.addEventListener("click", newPattern);
by("none")?.addEventListener("change", (event) => change(() => (sheet.no_pattern = event.target.checked)));
by("note").addEventListener("input", () => change(() => (sheet.note = by("note").value), "note"));
by("hand-in").addEventListener("click", handIn);
by("take-back").addEventListener("click", () => change(() => (sheet.done = false)));
by("undo").addEventListener("click", () => step(past, undone));
by("redo").addEventListener("click", () => step(undone, past));
by("keys").addEventListener("click", () => by("help").showModal());
for (const button of document.querySelectorAll("button.take")) button.addEventListener("click", () => take(button));
by("show-rest")?.addEventListener("click", (event) => {
  event.target.textContent = by("work").classList.toggle("with-rest") ? "Hide what follows" : "Show what follows";
});
by("take-newer").addEventListener("click", () => adopt(newer));
by("overwrite").addEventListener("click", () => {
  ({ version } = newer);
  saved = newer.sheet;
  newer = null;
  changed();
});

// ---- keys ----------------------------------------------------------------------------------------

function digit(number) {
  if (isComposition) return number <= 2 && answer(number === 1);
  if (!sheet.patterns[number - 1]) return;
  select(sheet.patterns[number - 1].id);
  if (rows.includes(document.activeElement)) mark(current + 1, !isMarked(current + 1));
}

const move = (by) => focusRow(rows.includes(document.activeElement) ? current + by : current);
const keys = {
  j: () => move(1),
  ArrowDown: () => move(1),
  k: () => move(-1),
  ArrowUp: () => move(-1),
  Home: () => focusRow(0),
  End: () => focusRow(rows.length - 1),
  " ": () => rows.includes(document.activeElement) && mark(current + 1, !isMarked(current + 1)),
  n: () => !isComposition && newPattern(),
  e: () => by("patterns")?.querySelector(".active textarea")?.focus(),
  s: () => setKind(active, "shallow"),
  m: () => setKind(active, "semantic"),
  0: () => by("none")?.click(),
  f: () => by("show-rest")?.click(),
  "[": () => by("previous")?.click(),
  "]": () => by("following")?.click(),
  "?": () => (by("help").open ? by("help").close() : by("help").showModal()),
  h: () => {}, // the explorer's own keys lead away from here
  r: () => {},
  t: () => {},
};

// Before the keys of the site.
document.addEventListener(
  "keydown",
  (event) => {
    const control = event.ctrlKey || event.metaKey;
    if (control && event.key === "Enter") return event.preventDefault(), void handIn();
    if (event.target.closest?.("textarea, select, input:not([type=checkbox]):not([type=radio])")) return;
    if (control && event.key.toLowerCase() === "z") {
      event.preventDefault();
      return event.shiftKey ? step(undone, past) : step(past, undone);
    }
    if (control || event.altKey || (by("help").open && event.key !== "?")) return;
    if (event.key === " " && event.target.closest?.("button, a, input")) return;
    if (/^Arrow|^Home$|^End$/.test(event.key) && !rows.includes(event.target)) return;
    const act = /^[1-9]$/.test(event.key) ? () => digit(Number(event.key)) : keys[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  },
  true,
);

restoreDraft();
render();
