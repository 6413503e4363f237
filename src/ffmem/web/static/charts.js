// Interactive charts: each place holds a static picture, which Vega replaces when it scrolls near.
//
//   <div class="chart" data-spec="/api/…" data-alt="…"><img alt="…"></div>
//
// Vega reads expressions with its interpreter (`ast`), so that no text becomes code, and adds no
// style of its own. A click on a mark opens its page, with the visitor's state: the query of the
// chart's own address. If anything fails, the static picture stays.

const root = document.documentElement;
const night = matchMedia("(prefers-color-scheme: dark)");
const drawn = new Map(); // place → {theme, width, view}
const NARROW = 430;

const theme = () => root.dataset.theme || (night.matches ? "dark" : "light");

// Vega is large: fetch it once, when the first chart scrolls near.
let vega;
const loaded = (version) => (vega ??= import(`/static/vega.js?v=${encodeURIComponent(version)}`).then(() => window.vegaEmbed));

const specs = new Map();
function specification(place) {
  const address = new URL(place.dataset.spec, location.href);
  address.searchParams.set("theme", theme());
  const key = address.href;
  if (!specs.has(key)) specs.set(key, fetched(address).catch((error) => (specs.delete(key), Promise.reject(error))));
  return specs.get(key);
}

async function fetched(address) {
  const answer = await fetch(address);
  const content = await answer.json();
  if (!answer.ok) throw new Error(content.error);
  return content;
}

// Vega fits a single plot to its container, but not several: give each what the axes leave.
function fitted(spec, width) {
  const own = structuredClone(spec);
  const gutter = own.usermeta?.gutter;
  if (gutter) for (const panel of own.vconcat) panel.width = Math.max(120, width - gutter);
  if (width < NARROW) own.config.legend.columns = 1;
  return own;
}

async function draw(place) {
  const now = { theme: theme(), width: place.clientWidth };
  if (!now.width) return; // folded away
  drawn.set(place, { ...drawn.get(place), ...now });
  try {
    const spec = await specification(place);
    const embed = await loaded(spec.usermeta.vega);
    if (stale(place, now)) return;
    const ground = document.createElement("div");
    ground.className = "ground";
    const before = drawn.get(place)?.view;
    const still = [...place.children];
    // In the page but not yet visible: Vega measures the width of its container.
    place.append(ground);
    const { view, finalize } = await embed(ground, fitted(spec, now.width), {
      actions: false,
      ast: true,
      defaultStyle: false,
      logLevel: 1, // errors; its warnings are about the figures' own tricks
      renderer: place.dataset.renderer || "svg",
      tooltip: (_, event, item, value) => tell(event, value),
    });
    if (stale(place, now)) {
      finalize();
      ground.remove();
      return;
    }
    before?.finalize();
    name(place);
    for (const old of still) old.remove();
    place.dataset.drawn = now.theme;
    view.addEventListener("click", (event, item) => follow(place, event, item));
    view.addEventListener("mousemove", (_, item) => ground.classList.toggle("linked", Boolean(linkOf(item))));
    drawn.set(place, { ...now, view: { finalize } });
  } catch (error) {
    place.querySelector(".ground:not(:first-child)")?.remove();
    if (!place.querySelector(".unmoved")) {
      const said = document.createElement("p");
      said.className = "unmoved fade small";
      said.textContent = `This chart is not interactive: ${error.message}`;
      place.append(said);
    }
  }
}

const stale = (place, now) => drawn.get(place)?.theme !== now.theme || drawn.get(place)?.width !== now.width;

// Keep the picture's alternative text.
function name(place) {
  place.setAttribute("role", "img");
  place.setAttribute("aria-label", place.dataset.alt);
}

const linkOf = (item) => (item?.mark?.marktype === "line" ? undefined : item?.datum?.url);

function follow(place, event, item) {
  const url = linkOf(item);
  if (!url) return;
  const target = new URL(url, location.href);
  const state = new URL(place.dataset.spec, location.href).searchParams;
  for (const kept of ["index", "text", "position", "off", "set", "scale"])
    for (const value of state.getAll(kept)) target.searchParams.append(kept, value);
  if (event.ctrlKey || event.metaKey) open(target, "_blank", "noopener");
  else location.assign(target);
}

// One tooltip for all charts; its content is text, never markup.
const tip = document.createElement("div");
tip.className = "tip";
tip.hidden = true;
document.body.append(tip);

function tell(event, value) {
  tip.hidden = value === null || value === undefined || value === "";
  if (tip.hidden) return;
  const table = document.createElement("table");
  for (const [key, said] of Object.entries(Object(value))) {
    const row = table.insertRow();
    const head = document.createElement("th");
    head.textContent = key;
    const cell = document.createElement("bdi");
    cell.textContent = said;
    row.append(head);
    row.insertCell().append(cell);
  }
  tip.replaceChildren(table);
  const { width, height } = tip.getBoundingClientRect();
  const x = event.clientX + 14 + width > innerWidth ? event.clientX - width - 14 : event.clientX + 14;
  const y = event.clientY + 14 + height > innerHeight ? event.clientY - height - 14 : event.clientY + 14;
  tip.style.left = `${Math.max(4, x)}px`;
  tip.style.top = `${Math.max(4, y)}px`;
}
addEventListener("scroll", () => (tip.hidden = true), { passive: true });
document.addEventListener("keydown", (event) => event.key === "Escape" && (tip.hidden = true));

const near = new IntersectionObserver(
  (seen) => {
    for (const { target, isIntersecting } of seen)
      if (isIntersecting && !drawn.has(target)) {
        draw(target);
        sized.observe(target);
      }
  },
  { rootMargin: "400px" },
);

let soon;
const sized = new ResizeObserver(() => {
  clearTimeout(soon);
  soon = setTimeout(again, 150);
});

function again() {
  for (const [place, { theme: old, width }] of drawn)
    if (old !== theme() || Math.abs(width - place.clientWidth) > 4) draw(place);
}
new MutationObserver(again).observe(root, { attributeFilter: ["data-theme"] });
night.addEventListener("change", again);

for (const place of document.querySelectorAll(".chart[data-spec]")) {
  // The static picture follows the system's theme; the visitor may have chosen the other.
  const source = place.querySelector("source");
  if (source && root.dataset.theme) source.media = root.dataset.theme === "dark" ? "all" : "not all";
  near.observe(place);
}
