// Niceties of the circuit page: the edges of the box under the pointer, and what it says in a line.
// Without this file every box is still a link with a title.

const graph = document.querySelector("svg.circuit");
const readout = document.getElementById("readout");

if (graph && readout) {
  const resting = readout.textContent;
  const edges = [...graph.querySelectorAll(".edge")];

  function show(box) {
    graph.classList.toggle("focused", Boolean(box));
    readout.textContent = box ? box.querySelector("title").textContent : resting;
    for (const edge of edges) {
      const { source, target } = edge.dataset;
      edge.classList.toggle("near", Boolean(box) && [source, target].includes(box.dataset.id));
    }
  }

  const boxOf = (event) => event.target.closest?.("g[data-id]") || event.target.querySelector?.(":scope > g[data-id]");
  for (const name of ["pointerover", "focusin"]) {
    graph.addEventListener(name, (event) => show(boxOf(event)));
  }
  graph.addEventListener("pointerleave", () => show(null));
  graph.addEventListener("focusout", () => show(null));

  // The prediction is at the right end of a long prompt.
  const scroll = graph.closest(".scroll");
  scroll.scrollLeft = scroll.scrollWidth;
}
