// Who points at a pattern sees its triggers; who points at a trigger's number sees the pattern.
// Without this file the numbers are plain links in both directions.

const shows = (element) => (element.dataset.patterns || "").split(" ");

function light(label) {
  for (const trigger of document.querySelectorAll(".trigger[data-patterns]")) {
    trigger.classList.toggle("lit", label !== null && shows(trigger).includes(label));
  }
  for (const pattern of document.querySelectorAll(".seen [data-pattern]")) {
    pattern.classList.toggle("lit", pattern.dataset.pattern === label);
  }
}

const pointed = (event) => event.target.closest?.("[data-pattern]")?.dataset.pattern ?? null;
for (const name of ["pointerover", "focusin"]) {
  document.addEventListener(name, (event) => light(pointed(event)));
}
document.addEventListener("focusout", () => light(null));
document.documentElement.addEventListener("pointerleave", () => light(null));
