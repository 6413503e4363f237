// Search while typing: a list below the box of every page, and the results in place on the page of
// search. Without this file both are plain forms. Text from the index becomes text, never markup.

const DELAY = 80; // milliseconds without a key before the server is asked
const SLOW = 200; // milliseconds after which the page says that it is searching

if (!document.querySelector('link[href="/static/search.css"]')) {
  const style = document.createElement("link");
  style.rel = "stylesheet";
  style.href = "/static/search.css";
  document.head.append(style);
}

// Return a debounced `ask(signal)`; a new call aborts the one before.
function patiently(ask) {
  let timer = 0;
  let running = new AbortController();
  const later = () => {
    clearTimeout(timer);
    running.abort();
    running = new AbortController();
    const { signal } = running;
    timer = setTimeout(() => ask(signal).catch((error) => {
      if (error.name !== "AbortError") throw error;
    }), DELAY);
  };
  later.stop = () => {
    clearTimeout(timer);
    running.abort();
  };
  return later;
}

// Return the fields of a form as parameters, without the empty ones.
function parameters(form) {
  const given = new URLSearchParams();
  for (const [name, value] of new FormData(form)) if (value !== "") given.append(name, value);
  return given;
}

function element(name, kind, text = "") {
  const made = document.createElement(name);
  if (kind) made.className = kind;
  made.textContent = text;
  return made;
}

// Make spaces and line ends visible, as the server's pages do.
const SIGNS = { "\n": "↵", "\r": "␍", "\t": "⇥" };
export function visible(text) {
  return text.replace(/[\n\r\t]/g, (sign) => SIGNS[sign]);
}
function visibleToken(text) {
  return visible(text).replaceAll(" ", "␣");
}

// ---------------------------------------------------------------- the box of every page

const NAMES = { layers: "Layer", experts: "Expert", memories: "Memory", values: "Values", triggers: "Triggers", patterns: "Patterns" };

function combobox(input, place) {
  const form = input.form;
  const list = element("div");
  list.id = "suggestion-list";
  list.setAttribute("role", "listbox");
  list.setAttribute("aria-label", "Search results");
  for (const [name, value] of Object.entries({
    role: "combobox",
    "aria-autocomplete": "list",
    "aria-controls": list.id,
    "aria-expanded": "false",
  })) input.setAttribute(name, value);
  let options = [];
  let active = -1;

  function close() {
    ask.stop();
    place.replaceChildren();
    options = [];
    choose(-1);
    input.setAttribute("aria-expanded", "false");
  }

  function choose(number) {
    active = number;
    options.forEach((option, place) => option.setAttribute("aria-selected", String(place === number)));
    if (number < 0) return input.removeAttribute("aria-activedescendant");
    input.setAttribute("aria-activedescendant", options[number].id);
    options[number].scrollIntoView({ block: "nearest" });
  }

  function option(path, kind, query = {}) {
    const state = parameters(form);
    state.delete("q");
    for (const [name, value] of Object.entries(query)) state.set(name, value);
    const made = element("a", kind);
    made.href = state.size ? `${path}?${state}` : path;
    made.id = `suggestion-${options.length}`;
    made.tabIndex = -1;
    made.setAttribute("role", "option");
    made.setAttribute("aria-selected", "false");
    options.push(made);
    return made;
  }

  function entry(hit, name) {
    const made = option(hit.memory !== null ? `/m/${hit.cell}` : `/layer/${hit.layer}${hit.bank ? `/${hit.bank}` : ""}`);
    const shown = name === "values" || name === "memories" ? visibleToken : visible;
    const text = element("bdi", "text");
    if (name === "layers") text.append("all memories of this layer");
    else if (name === "experts") text.append("its tokens and its memories");
    else if (name === "memories") text.append(hit.tokens.map(visibleToken).join("  "));
    else {
      const before = name === "values" ? hit.before : hit.before.slice(-24);
      if (name === "patterns") {
        const dot = element("span", `dot ${hit.kind}`);
        dot.title = `${hit.kind}, source: ${hit.source}`;
        text.append(dot, " ");
      }
      text.append(shown(before), element("mark", "", shown(hit.match)), shown(hit.after + hit.rest));
    }
    made.append(element("span", "cell", hit.cell), text);
    return made;
  }

  function show(answer) {
    options = [];
    list.replaceChildren();
    for (const group of answer.groups) {
      if (!group.total) continue;
      const box = element("div");
      box.setAttribute("role", "group");
      box.setAttribute("aria-label", NAMES[group.name]);
      const name = element("div", "name", NAMES[group.name]);
      const count = `${group.at_least ? "at least " : ""}${group.total.toLocaleString("en")}`;
      if (!["layers", "experts", "memories"].includes(group.name)) name.append(element("span", "", count));
      box.append(name, ...group.hits.map((hit) => entry(hit, group.name)));
      list.append(box);
    }
    const any = options.length > 0;
    const all = option("/search", "whole", { q: answer.query, prefix: 1 });
    all.append(any ? "All results" : "No matches");
    list.append(all);
    place.replaceChildren(list);
    input.setAttribute("aria-expanded", "true");
    choose(-1);
  }

  const ask = patiently(async (signal) => {
    const query = parameters(form);
    query.set("prefix", "1");
    query.set("limit", "4");
    const slow = setTimeout(() => place.replaceChildren(element("p", "note", "Searching …")), SLOW);
    try {
      const response = await fetch(`/api/search?${query}`, { signal });
      const answer = await response.json();
      if (document.activeElement !== input) return close();
      if (response.ok) show(answer);
      else {
        options = [];
        choose(-1);
        place.replaceChildren(element("p", "note", answer.error));
      }
    } catch (error) {
      if (error.name === "AbortError") throw error;
      place.replaceChildren(element("p", "note", "The server does not respond."));
    } finally {
      clearTimeout(slow);
    }
  });

  input.addEventListener("input", () => (input.value.trim() ? ask() : close()));
  input.addEventListener("focus", () => input.value.trim() && ask());
  form.addEventListener("focusout", (event) => form.contains(event.relatedTarget) || close());
  // Keep the focus when an option is pressed, else the list would close before the click.
  place.addEventListener("pointerdown", (event) => event.preventDefault());
  input.addEventListener("keydown", (event) => {
    const open = options.length > 0;
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (step && open) {
      const count = options.length + 1; // one place stands for the box itself
      choose(((active + 1 + step + count) % count) - 1);
      event.preventDefault();
    } else if (event.key === "Enter" && active >= 0) {
      event.preventDefault();
      options[active].click();
    } else if (event.key === "Escape" && place.childElementCount) {
      event.preventDefault();
      event.stopPropagation();
      close();
    }
  });
}

// ---------------------------------------------------------------- the page of search

function inPlace(form) {
  const words = form.elements.namedItem("q");
  const longer = form.elements.namedItem("prefix");
  const ask = patiently(async (signal) => {
    const query = parameters(form);
    const address = query.size ? `${form.action}?${query}` : form.action;
    const results = document.getElementById("results");
    const slow = setTimeout(() => results.classList.add("busy"), SLOW);
    try {
      const response = await fetch(address, { signal });
      const page = new DOMParser().parseFromString(await response.text(), "text/html");
      const fresh = page.getElementById("results");
      if (!fresh) return form.requestSubmit(); // another kind of answer: let the browser show it
      document.getElementById("results").replaceWith(document.adoptNode(fresh));
      history.replaceState(null, "", address);
    } finally {
      clearTimeout(slow);
      results.classList.remove("busy");
    }
  });
  words.addEventListener("input", () => {
    longer.checked = true; // the last word may not be whole yet
    ask();
  });
  form.addEventListener("change", (event) => event.target !== words && ask());
  form.addEventListener("submit", () => ask.stop());
}

const box = document.getElementById("q");
const suggestions = document.getElementById("suggestions");
if (box && suggestions) combobox(box, suggestions);
const form = document.getElementById("search");
if (form) inPlace(form);
