// Keys, theme, copy buttons, and the scroll position. Every page works without this file.

const root = document.documentElement;

// Theme: the system's, until the visitor chooses.
const button = document.getElementById("theme");
const dark = matchMedia("(prefers-color-scheme: dark)");
function theme() {
  return root.dataset.theme || (dark.matches ? "dark" : "light");
}
if (button) {
  button.hidden = false;
  button.addEventListener("click", () => {
    root.dataset.theme = theme() === "dark" ? "light" : "dark";
    try {
      localStorage.setItem("ffmem-theme", root.dataset.theme);
    } catch {
      // Storage is off: the choice lasts as long as the page.
    }
  });
}

// A moving bar at the top while the next page is slow to come.
function leaving() {
  setTimeout(() => root.classList.add("leaving"), 200);
}
addEventListener("pageshow", () => root.classList.remove("leaving"));
document.addEventListener("submit", (event) => {
  if (!event.defaultPrevented) leaving();
});
document.addEventListener("click", (event) => {
  const link = event.target.closest?.("a[href]");
  const plain = !event.defaultPrevented && event.button === 0 && !(event.ctrlKey || event.metaKey || event.shiftKey);
  if (!link || !plain || link.target || link.hasAttribute("download") || link.origin !== location.origin) return;
  const samePage = link.pathname === location.pathname && link.search === location.search;
  if (samePage && link.hash) return;
  leaving();
  // The same page with another edit: keep the scroll position.
  if (link.pathname === location.pathname && !link.hash) {
    try {
      sessionStorage.setItem("ffmem-place", JSON.stringify([link.pathname + link.search, scrollX, scrollY]));
    } catch {
      // Storage is off: the new page starts at its top.
    }
  }
});
try {
  const [address, x, y] = JSON.parse(sessionStorage.getItem("ffmem-place") || "[]");
  sessionStorage.removeItem("ffmem-place");
  if (address === location.pathname + location.search) scrollTo(x, y);
} catch {
  // Storage is off.
}

// Choosing an index opens it at once.
document.getElementById("index")?.addEventListener("change", (event) => event.target.form.requestSubmit());

// Copy buttons, which need this script.
for (const copy of document.querySelectorAll("button[data-copies]")) {
  copy.hidden = false;
  copy.addEventListener("click", async () => {
    const text = document.getElementById(copy.dataset.copies).textContent;
    try {
      await navigator.clipboard.writeText(text);
      copy.textContent = "Copied";
    } catch {
      copy.textContent = "Select it and copy";
    }
    setTimeout(() => (copy.textContent = "Copy"), 1500);
  });
}

// Keys: / search, j k or ← → next and previous, t trace, h home, ? a list of them.
const help = document.createElement("dialog");
help.className = "help";
help.setAttribute("aria-label", "Keys");
for (const [key, what] of [
  ["/", "search"],
  ["j or →", "next memory, layer or page"],
  ["k or ←", "previous"],
  ["t", "trace"],
  ["h", "front page"],
  ["r", "a random memory"],
  ["d", "light or dark"],
  ["Esc", "close, leave a field"],
]) {
  const row = document.createElement("p");
  const name = document.createElement("kbd");
  name.textContent = key;
  row.append(name, ` ${what}`);
  help.append(row);
}
document.body.append(help);

function follow(selector) {
  const link = document.querySelector(selector);
  if (link) link.click();
}

document.addEventListener("keydown", (event) => {
  const field = event.target.closest?.("input, select, textarea, [contenteditable]");
  if (event.key === "Escape" && field) field.blur();
  if (field || event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
  const actions = {
    "/": () => document.getElementById("q")?.focus(),
    j: () => follow("a[rel=next]"),
    ArrowRight: () => follow("a[rel=next]"),
    k: () => follow("a[rel=prev]"),
    ArrowLeft: () => follow("a[rel=prev]"),
    t: () => follow('header nav a[href^="/trace"]'),
    h: () => follow("a.brand"),
    r: () => follow('a[href^="/random"]'),
    d: () => button?.click(),
    "?": () => (help.open ? help.close() : help.showModal()),
  };
  const action = actions[event.key];
  if (!action) return;
  event.preventDefault();
  action();
});
