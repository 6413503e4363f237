// Tints every token of the shown prefixes by the memory's coefficient there, a few prefixes at a
// time. Without this file, or without the model, the last token alone is marked.
import { visible } from "/static/search.js";

const CHUNK = 4; // prefixes per request
const CHARACTERS = 220; // of a prefix, as on the server's page

const lists = document.getElementById("lists");
const note = document.querySelector(".tint span");
const said = note.textContent;
const largest = Number(lists.dataset.largest);
let running = false;

// The space before a word is not tinted: words stand apart, and break where they should.
function pieces(text, number, isLast) {
  const word = text.trimStart() || text;
  const made = document.createElement("span");
  const tenth = Math.round(10 * Math.min(1, Math.abs(number) / largest));
  made.className = `t${tenth ? ` ${number < 0 ? "m" : "p"}${tenth}` : ""}${isLast ? " last" : ""}`;
  made.textContent = visible(word);
  made.title = `${number < 0 ? "−" : "+"}${Number(Math.abs(number).toPrecision(3))}`;
  return [visible(text.slice(0, text.length - word.length)), made];
}

function tint(trigger, read) {
  let first = 0;
  let length = read.tokens.join("").length;
  while (first < read.length - 1 && length > CHARACTERS) length -= read.tokens[first++].length;
  const shown = read.tokens
    .slice(first)
    .flatMap((text, i) => pieces(text, read.coefficients[first + i], first + i === read.length - 1));
  trigger.querySelector(".text").replaceChildren(...(first ? ["…"] : []), ...shown);
}

async function tintAll() {
  if (running) return;
  running = true;
  const late = setTimeout(() => (note.textContent = lists.dataset.waits), 300);
  try {
    for (;;) {
      const open = [...lists.querySelectorAll(".trigger[data-at]")].filter((one) => one.checkVisibility());
      const next = open.slice(0, CHUNK);
      if (!next.length) break;
      const address = new URL(lists.dataset.tint, location.href);
      address.searchParams.set("at", next.map((one) => one.dataset.at).join(","));
      const response = await fetch(address);
      const answer = await response.json();
      if (!response.ok) throw new Error(answer.error);
      answer.forEach((read, i) => {
        tint(next[i], read);
        delete next[i].dataset.at;
      });
    }
    note.textContent = said;
  } catch (error) {
    note.textContent = `Only last tokens are tinted. ${error.message}`;
  } finally {
    clearTimeout(late);
    running = false;
  }
}

lists.addEventListener("toggle", tintAll, true); // a list that unfolds
tintAll();
