// The editor of a sheet: marking by click, drag and key, patterns, hand in. The page is a plain
// form without this file; with it, every change is saved by itself (annotate-saving.js).

import { id, recover, Saving } from "./annotate-saving.js";

const COLOURS = 9;
const MOST_PATTERNS = 30;
const form = document.getElementById("sheet");
const by = (name) => document.getElementById(name);

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value != null) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

const colour = (number) => `c${((number - 1) % COLOURS) + 1}`;
const plural = (n, what) => `${n} ${what}${n === 1 ? "" : "s"}`;

if (form) edit();
else {
  // The queue: work that a closed page left here is sent from wherever somebody is.
  const queue = by("queue");
  const say = (text) => (by("state").textContent = text);
  if (queue) {
    recover(queue.dataset.person, {
      lost: (why) => say(`Work of before is not saved yet: ${why}, trying again`),
      done: () => say("Work that had not been saved is saved now. Load the page again to see it counted."),
    });
  }
}

function edit() {
  document.documentElement.classList.add("scripted");
  const { dataset } = form;
  const addresses = { save: dataset.api, undo: dataset.undo, redo: dataset.redo };
  const rows = [...document.querySelectorAll("#texts > li")];
  const isComposition = "composition" in dataset;
  let active = null; // the id of the pattern that marks
  let current = 0; // the row that keys act on
  let handing = false;

  const saving = new Saving(addresses, dataset.person, JSON.parse(dataset.stand), {
    state: showState,
    stand: showStand,
    sheet: render,
    incoming: (text) => {
      by("incoming").hidden = false;
      by("incoming").textContent = text;
    },
    clash: choose,
    elsewhere: (address) => {
      const link = element("a", { href: address.replace("/api/annotate/", `/${dataset.room}/`) }, "Open it and choose");
      by("incoming").hidden = false;
      by("incoming").replaceChildren("Another item has two versions of the same words. ", link);
    },
  });

  const patterns = () => saving.sheet.patterns;
  const find = (sheet, one) => sheet.patterns.find((pattern) => pattern.id === one);
  const locked = () => saving.sheet.done;

  // ---- what is shown -------------------------------------------------------------------------

  function showState(kind, text) {
    const line = by("state");
    line.className = `small ${kind}`;
    line.textContent = text;
  }

  function showStand(stand) {
    by("undo").disabled = !stand.can_undo;
    by("redo").disabled = !stand.can_redo;
    by("problems").replaceChildren(...stand.problems.map((text) => element("li", {}, text)));
    form.elements.base.value = stand.version;
    if (handing && stand.sheet.done) {
      handing = false;
      const place = new URL(form.action);
      place.pathname = `/${dataset.room}${stand.next ? `/${stand.next}` : ""}`;
      location.assign(place);
    }
  }

  function render() {
    if (!find(saving.sheet, active)) active = patterns()[0]?.id ?? null;
    const done = locked();
    form.classList.toggle("locked", done);
    by("done").hidden = !done;
    by("hand-in").hidden = done;
    by("problems").hidden = done || !by("problems").children.length;
    if (document.activeElement !== by("note")) by("note").value = saving.sheet.note;
    by("note").disabled = done;
    for (const button of document.querySelectorAll("button.take")) showTake(button);
    if (isComposition) return renderAnswer(done);
    by("none").checked = saving.sheet.no_pattern;
    by("none").disabled = by("add").disabled = done;
    renderPatterns(done);
    renderRows(done);
  }

  function renderAnswer(done) {
    for (const radio of form.elements.related) {
      radio.checked = saving.sheet.related !== null && saving.sheet.related === (radio.value === "yes");
      radio.disabled = done;
    }
  }

  function renderPatterns(done) {
    const panel = by("patterns");
    const cards = new Map([...panel.children].map((card) => [card.dataset.id, card]));
    patterns().forEach((pattern, place) => {
      const card = cards.get(pattern.id) ?? makeCard(pattern.id);
      cards.delete(pattern.id);
      showCard(card, pattern, place + 1, done);
      if (panel.children[place] !== card) panel.insertBefore(card, panel.children[place] ?? null);
    });
    for (const card of cards.values()) card.remove();
    by("strip").replaceChildren(
      ...patterns().map((pattern, place) => numberButton(pattern.id, place + 1, () => setActive(pattern.id))),
      ...(done ? [] : [element("button", { type: "button", class: "small", onclick: addPattern }, "+")]),
    );
  }

  function numberButton(one, number, act) {
    const pressed = one === active;
    const title = `Mark with pattern ${number}`;
    return element("button", { type: "button", class: `num ${colour(number)}`, "aria-pressed": String(pressed), "aria-label": title, title, onclick: act }, String(number));
  }

  function makeCard(one) {
    const text = element("textarea", { rows: "2", maxlength: "500", dir: "auto", placeholder: "What do the texts share?" });
    text.addEventListener("input", () => saving.change((sheet) => (find(sheet, one).description = text.value)));
    text.addEventListener("focus", () => setActive(one));
    text.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.ctrlKey && !event.isComposing) {
        event.preventDefault();
        focusRow(current);
      }
    });
    const kinds = ["shallow", "semantic"].map((kind) =>
      element(
        "button",
        { type: "button", "data-kind": kind, "aria-pressed": "false", onclick: () => saving.change((sheet) => (find(sheet, one).kind = kind)) },
        kind,
      ),
    );
    const card = element(
      "div",
      { class: "pat", "data-id": one, role: "group" },
      element("span", { class: "slot" }),
      text,
      element("span", { class: "kinds", role: "group", "aria-label": "Kind" }, ...kinds),
      element("span", { class: "count" }),
      element("button", { type: "button", class: "remove quiet", title: "Remove this pattern", onclick: () => removePattern(one) }, "✕"),
    );
    card.addEventListener("mousedown", () => setActive(one));
    return card;
  }

  function showCard(card, pattern, number, done) {
    card.className = `pat ${colour(number)}${pattern.id === active ? " active" : ""}`;
    card.setAttribute("aria-label", `Pattern ${number}`);
    card.querySelector(".slot").replaceChildren(numberButton(pattern.id, number, () => setActive(pattern.id)));
    const text = card.querySelector("textarea");
    text.setAttribute("aria-label", `What the texts of pattern ${number} share`);
    if (text.value !== pattern.description) text.value = pattern.description;
    text.disabled = done;
    for (const button of card.querySelectorAll("[data-kind]")) {
      button.setAttribute("aria-pressed", String(button.dataset.kind === pattern.kind));
      button.disabled = done;
    }
    card.querySelector(".count").textContent = plural(pattern.marks.length, "text");
    const remove = card.querySelector(".remove");
    remove.setAttribute("aria-label", `Remove pattern ${number}`);
    remove.hidden = done;
  }

  function renderRows(done) {
    const place = patterns().findIndex((pattern) => pattern.id === active);
    by("texts").setAttribute("aria-label", place < 0 ? "Texts" : `Texts; those marked show pattern ${place + 1}`);
    rows.forEach((row, at) => {
      const rank = at + 1;
      const shown = patterns().map((pattern, index) => [pattern, index + 1]).filter(([pattern]) => pattern.marks.includes(rank));
      const marked = shown.some(([pattern]) => pattern.id === active);
      row.setAttribute("aria-selected", String(marked));
      row.setAttribute("aria-disabled", String(done));
      row.className = marked ? `marked ${colour(place + 1)}` : "";
      row.tabIndex = at === current ? 0 : -1;
      const chips = shown.map(([, number]) => element("span", { class: `num ${colour(number)}` }, String(number)));
      row.querySelector(".marks.live").replaceChildren(element("span", { class: "hide" }, shown.length ? " Patterns: " : ""), ...chips);
    });
  }

  function showTake(button) {
    const offered = JSON.parse(button.dataset.patterns);
    const all = offered.every((pattern) => find(saving.sheet, pattern.id)) && (button.dataset.none !== "true" || saving.sheet.no_pattern);
    button.disabled = locked() || all;
  }

  // ---- what changes --------------------------------------------------------------------------

  function setActive(one) {
    if (active === one) return;
    active = one;
    render();
  }

  function addPattern() {
    if (locked() || patterns().length >= MOST_PATTERNS) return;
    const made = create();
    by("patterns").querySelector(`[data-id="${made}"] textarea`).focus();
  }

  function create() {
    const made = `p-${id()}`;
    active = made;
    saving.change((sheet) => {
      sheet.patterns.push({ id: made, description: "", kind: null, marks: [] });
      sheet.no_pattern = false;
    });
    return made;
  }

  function removePattern(one) {
    if (!locked()) saving.change((sheet) => (sheet.patterns = sheet.patterns.filter((pattern) => pattern.id !== one)));
  }

  function mark(rank, on) {
    if (locked()) return;
    if (!active) create();
    const one = active;
    if (find(saving.sheet, one).marks.includes(rank) === on) return;
    saving.change((sheet) => {
      const pattern = find(sheet, one);
      pattern.marks = on ? [...pattern.marks, rank] : pattern.marks.filter((mark) => mark !== rank);
    });
  }

  const isMarked = (rank) => Boolean(find(saving.sheet, active)?.marks.includes(rank));

  async function handIn() {
    await saving.settled();
    if (locked()) return;
    if (by("problems").children.length || (!isComposition && !patterns().length && !saving.sheet.no_pattern)) {
      by("problems").hidden = false;
      by("problems").classList.add("asked");
      by("problems").scrollIntoView({ block: "nearest" });
      return;
    }
    handing = true;
    saving.change((sheet) => (sheet.done = true));
    await saving.settled();
    handing = false;
  }

  function choose(clashes) {
    const said = (value) => (value === true ? "yes" : value === false ? "no" : (value ?? "not said")) || "nothing";
    by("versions").replaceChildren(
      ...clashes.map((one) =>
        element("div", {}, element("dt", {}, one.what), element("dd", {}, "yours: ", element("bdi", {}, said(one.mine))), element("dd", {}, "theirs: ", element("bdi", {}, said(one.theirs)))),
      ),
    );
    by("refused").hidden = false;
    by("refused").scrollIntoView({ block: "nearest" });
    by("mine").focus();
    return new Promise((resolve) => {
      const answer = (side) => () => {
        by("refused").hidden = true;
        by("mine").onclick = by("theirs").onclick = null;
        resolve(side);
      };
      by("mine").onclick = answer("mine");
      by("theirs").onclick = answer("theirs");
    });
  }

  // ---- mouse and fields ----------------------------------------------------------------------

  let painting = null; // what a drag does: mark, unmark, or nothing
  if (rows.length) {
    by("texts").setAttribute("role", "listbox");
    by("texts").setAttribute("aria-multiselectable", "true");
  }
  rows.forEach((row, at) => {
    row.setAttribute("role", "option");
    row.addEventListener("mousedown", (event) => {
      if (event.button || locked()) return;
      event.preventDefault(); // no selection of text
      document.activeElement?.blur?.();
      painting = !isMarked(at + 1);
      mark(at + 1, painting);
      focusRow(at, false);
    });
    row.addEventListener("mouseenter", (event) => {
      if (painting === null || !(event.buttons & 1)) return;
      mark(at + 1, painting);
      focusRow(at, false);
    });
    // A screen reader's click comes without a mouse.
    row.addEventListener("click", (event) => event.detail === 0 && mark(at + 1, !isMarked(at + 1)));
    row.addEventListener("focus", () => {
      current = at;
      rows.forEach((other, place) => (other.tabIndex = place === at ? 0 : -1));
    });
  });
  addEventListener("mouseup", () => (painting = null));

  function focusRow(at, scroll = true) {
    if (!rows.length) return;
    current = Math.max(0, Math.min(rows.length - 1, at));
    rows[current].focus({ preventScroll: true });
    if (scroll) rows[current].scrollIntoView({ block: "nearest" });
  }

  by("add")?.addEventListener("click", addPattern);
  by("none")?.addEventListener("change", (event) => saving.change((sheet) => (sheet.no_pattern = event.target.checked)));
  by("note").addEventListener("input", () => saving.change((sheet) => (sheet.note = by("note").value)));
  if (isComposition) {
    for (const radio of form.elements.related) radio.addEventListener("change", () => answer(radio.value === "yes"));
  }
  function answer(related) {
    if (!locked()) saving.change((sheet) => (sheet.related = related));
  }

  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("click", (event) => {
    const button = event.target.closest("button[name]");
    if (!button) return;
    event.preventDefault();
    if (button.name === "take") return take(button);
    const acts = {
      "hand-in": handIn,
      "take-back": () => saving.change((sheet) => (sheet.done = false)),
      undo: () => saving.step("undo"),
      redo: () => saving.step("redo"),
    };
    acts[button.value]?.();
  });

  function take(button) {
    if (locked()) return;
    const offered = JSON.parse(button.dataset.patterns);
    saving.change((sheet) => {
      for (const pattern of offered) if (!find(sheet, pattern.id)) sheet.patterns.push(pattern);
      if (button.dataset.none === "true") sheet.no_pattern = true;
    });
    if (offered.length) setActive(offered[0].id);
  }

  const rest = by("show-rest");
  rest?.addEventListener("click", (event) => {
    event.preventDefault();
    rest.textContent = by("work").classList.toggle("with-rest") ? "Hide what follows" : "Show what follows";
  });

  // Two adjudicators share a sheet: each sees soon what the other does.
  if (dataset.room === "adjudicate") setInterval(() => document.hidden || saving.refresh(), 5_000);

  // ---- keys ----------------------------------------------------------------------------------

  const help = element("dialog", { class: "help", "aria-label": "Keys" });
  for (const [key, what] of [
    ["j k or ↓ ↑", "next and previous text"],
    ["Space", "mark the text with the chosen pattern"],
    ["1 … 9", isComposition ? "1 related, 2 distant" : "mark it with that pattern, and choose it"],
    ["n", "a new pattern"],
    ["e", "describe the chosen pattern; Enter goes back"],
    ["s m", "call it shallow, semantic"],
    ["0", "no pattern here"],
    ["f", "show what follows the texts"],
    ["Ctrl-Z", "undo; with Shift, redo"],
    ["[ ]", "previous and next item"],
    ["Ctrl-Enter", "hand in"],
  ]) {
    help.append(element("p", {}, element("kbd", {}, key), ` ${what}`));
  }
  document.body.append(help);
  by("keys").addEventListener("click", () => help.showModal());

  function digit(number) {
    if (isComposition) return number <= 2 && answer(number === 1);
    const pattern = patterns()[number - 1];
    if (!pattern) return;
    setActive(pattern.id);
    if (rows.includes(document.activeElement)) mark(current + 1, !isMarked(current + 1));
  }

  const call = (kind) => active && !locked() && saving.change((sheet) => (find(sheet, active).kind = kind));
  const move = (by) => focusRow(rows.includes(document.activeElement) ? current + by : current);
  const keys = {
    j: () => move(1),
    ArrowDown: () => move(1),
    k: () => move(-1),
    ArrowUp: () => move(-1),
    Home: () => focusRow(0),
    End: () => focusRow(rows.length - 1),
    " ": () => rows.includes(document.activeElement) && mark(current + 1, !isMarked(current + 1)),
    n: () => !isComposition && addPattern(),
    e: () => by("patterns")?.querySelector(".active textarea")?.focus(),
    s: () => call("shallow"),
    m: () => call("semantic"),
    0: () => by("none")?.click(),
    f: () => rest?.click(),
    "[": () => by("previous")?.click(),
    "]": () => by("following")?.click(),
    "?": () => (help.open ? help.close() : help.showModal()),
  };

  // Before the keys of the site, some of which lead away from here.
  document.addEventListener(
    "keydown",
    (event) => {
      const control = event.ctrlKey || event.metaKey;
      if (control && event.key === "Enter") return event.preventDefault(), handIn();
      const field = event.target.closest?.("textarea, select, input:not([type=checkbox]):not([type=radio])");
      if (field) return;
      if (control && event.key.toLowerCase() === "z") {
        event.preventDefault();
        return void saving.step(event.shiftKey ? "redo" : "undo");
      }
      if (control || event.altKey || help.open) return;
      if (event.key === " " && event.target.closest?.("button, a, input")) return;
      if (/^Arrow|^Home$|^End$/.test(event.key) && !rows.includes(event.target)) return;
      const act = /^[1-9]$/.test(event.key) ? () => digit(Number(event.key)) : keys[event.key];
      if (act) {
        event.preventDefault();
        act();
      } else if (["h", "r", "t"].includes(event.key)) event.preventDefault();
    },
    true,
  );

  showStand(JSON.parse(dataset.stand));
  render();
}
