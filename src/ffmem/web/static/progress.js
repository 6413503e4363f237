// How far an unfinished index is. Without this file, a reload shows the same.
const SECONDS = 2;

const note = document.getElementById("progress");
const [text, link] = [note.querySelector("span"), note.querySelector("a")];
let failures = 0;

// Overviews reload by themselves, every five seconds at most, unless the visitor is typing.
function mayReload() {
  if (performance.now() < 5000) return false;
  const typing = document.activeElement?.matches("input, textarea, select");
  return note.dataset.reload && !typing && !document.hidden && !document.querySelector("dialog[open]");
}

async function update() {
  try {
    const response = await fetch(new URL(note.dataset.progress, location.href));
    const progress = await response.json();
    if (!response.ok || !progress) throw new Error();
    failures = 0;
    text.textContent = progress.message;
    const share = progress.tokens ? progress.tokens_read / progress.tokens : 0;
    note.querySelector("rect").setAttribute("width", `${(100 * share).toFixed(1)}%`);
    if (progress.version !== note.dataset.version) {
      if (mayReload()) return location.reload();
      link.hidden = Boolean(note.dataset.reload) && !progress.done;
    }
    if (progress.done) return;
  } catch {
    if (++failures > 10) return; // the server is gone
  }
  setTimeout(update, 1000 * SECONDS);
}

setTimeout(update, 1000 * SECONDS);
