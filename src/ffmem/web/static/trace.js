// Niceties of the trace page: keys within the grid, and a line that tells what is under the pointer.
// Without this file every cell is still a link with a title.

const grid = document.querySelector("table.grid");
const readout = document.getElementById("readout");

if (grid && readout) {
  const resting = readout.textContent;
  const rows = [...grid.querySelectorAll("tbody tr")].map((row) => [...row.querySelectorAll("td a")]);
  const places = new Map(rows.flatMap((row, y) => row.map((cell, x) => [cell, [x, y]])));
  const cell = (event) => event.target.closest?.("td a");

  // One stop for the Tab key; arrows go from there.
  let current = grid.querySelector("td a[aria-current]") || rows[0]?.[0];
  for (const one of places.keys()) one.tabIndex = one === current ? 0 : -1;

  function tell(one) {
    readout.textContent = one ? one.title : resting;
  }

  function go(one) {
    if (!one) return;
    current.tabIndex = -1;
    current = one;
    current.tabIndex = 0;
    current.focus({ preventScroll: false });
  }

  // The title is told below the grid: the browser's own box would hide the cells around.
  for (const name of ["pointerover", "focusin"]) {
    grid.addEventListener(name, (event) => cell(event) && tell(cell(event)));
  }
  grid.addEventListener("pointerleave", () => tell(null));
  grid.addEventListener("focusout", () => tell(null));

  const steps = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  grid.addEventListener("keydown", (event) => {
    const one = cell(event);
    if (!one || event.ctrlKey || event.metaKey || event.altKey) return;
    const [x, y] = places.get(one);
    const ends = { Home: rows[y][0], End: rows[y].at(-1) };
    if (steps[event.key]) go(rows[y + steps[event.key][1]]?.[x + steps[event.key][0]]);
    else if (ends[event.key]) go(ends[event.key]);
    else if (event.key === "Escape") one.blur();
    else return;
    event.preventDefault();
  });

  // A wide grid opens where it is read.
  const scroll = grid.parentElement;
  const picked = grid.querySelector("thead th.picked");
  if (picked && picked.offsetLeft + picked.offsetWidth / 2 > scroll.clientWidth) {
    scroll.scrollLeft = picked.offsetLeft + picked.offsetWidth - scroll.clientWidth + 8;
  }
}

// Enter traces; a new line is Shift and Enter.
const text = document.getElementById("text");
text?.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  text.form.requestSubmit();
});

// Esc closes what is open for a memory.
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  for (const open of document.querySelectorAll("details.change[open]")) open.open = false;
});
