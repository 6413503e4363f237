// Saves a sheet after every change, and loses nothing on the way.
//
// What is not acknowledged lies in localStorage: what was sent, under the id of its request, and
// what was changed since. A request is repeated with the same id until it is answered, so that the
// server counts it once; after a reload, whichever page is opened next sends what is left.

import { difference, merge, plain, same } from "./annotate-merging.js";

const SOON = 400; // milliseconds without a change, before it is saved
const PATIENCE = 10_000; // milliseconds for an answer
const LONGEST = 8_000; // milliseconds between two attempts

export function id() {
  const bytes = crypto.getRandomValues(new Uint8Array(12));
  return [...bytes].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

// Storage may be forbidden or full: then the page says so.
const storage = {
  set(key, value) {
    try {
      localStorage.setItem(key, JSON.stringify(value));
      return true;
    } catch {
      return false;
    }
  },
  get(key) {
    try {
      return JSON.parse(localStorage.getItem(key));
    } catch {
      return null;
    }
  },
  remove(key) {
    try {
      localStorage.removeItem(key);
    } catch {
      // Then there was nothing.
    }
  },
  keys(prefix) {
    try {
      return Object.keys(localStorage).filter((key) => key.startsWith(prefix));
    } catch {
      return [];
    }
  },
};

// Sends one change until it is answered; `lost` is told when it has to be tried again.
async function post(address, body, lost = () => {}) {
  const text = JSON.stringify(body);
  for (let wait = 500; ; wait = Math.min(2 * wait, LONGEST)) {
    try {
      const answer = await fetch(address, {
        method: "POST",
        headers: { "content-type": "application/json", "x-ffmem": "annotate" },
        body: text,
        signal: AbortSignal.timeout(PATIENCE),
        keepalive: text.length < 15_000, // it outlives the page; browsers allow 64 KiB of that
      });
      if (answer.status < 500) return { status: answer.status, content: await answer.json() };
      lost("the server has trouble");
    } catch {
      lost("no connection");
    }
    await new Promise((resolve) => {
      const timer = setTimeout(resolve, wait);
      addEventListener("online", () => (clearTimeout(timer), resolve()), { once: true });
    });
  }
}

// Work of pages that are closed now: sent in its order, whichever item it is of.
export async function recover(person, { lost = () => {}, clash, done = () => {}, own, elsewhere = () => {} } = {}) {
  const prefix = `ffmem-sheet:${person}:`;
  for (const key of storage.keys(prefix)) {
    const replay = async () => {
      const record = storage.get(key);
      if (!record) return;
      // Words of another item are chosen on its own page, where its texts are.
      if (await resent(record, lost, record.address === own ? clash : null, elsewhere)) {
        storage.remove(key);
        done(record.address);
      }
    };
    // A page that is still open holds the lock of its own record.
    if (navigator.locks) await navigator.locks.request(key, { ifAvailable: true }, (lock) => (lock ? replay() : null));
    else await replay();
  }
}

async function resent(record, lost, clash, elsewhere) {
  let { version, base } = record;
  let mine = record.pending?.sheet;
  let request = record.pending?.request;
  if (record.sent) {
    const answer = await post(record.sent.address, record.sent.body, lost);
    if (answer.status === 200) {
      if (!mine) return true;
      mine = merge(record.sent.sheet, mine, answer.content.sheet).sheet;
      ({ version, sheet: base } = answer.content);
    } else if (answer.status !== 409) {
      return answer.status === 404 || answer.status === 422; // refused for good: nothing to keep
    } else {
      mine ??= record.sent.sheet;
      request = id();
    }
  }
  for (;;) {
    const answer = await post(record.address, { base: version, request, sheet: mine }, lost);
    if (answer.status === 200 || answer.status === 404 || answer.status === 422) return true;
    if (answer.status !== 409) return false;
    const theirs = answer.content;
    const { clashes } = merge(base, mine, theirs.sheet);
    if (clashes.length && !clash) {
      elsewhere(record.address);
      return false; // its own page will ask
    }
    const prefer = clashes.length ? await clash(clashes) : "mine";
    mine = merge(base, mine, theirs.sheet, prefer).sheet;
    ({ version, sheet: base } = theirs);
    request = id();
  }
}

export class Saving {
  // `on`: state(kind, text), stand(answer), sheet(), incoming(text), clash(clashes) -> "mine" | "theirs".
  constructor(addresses, person, stand, on) {
    this.addresses = addresses;
    this.on = on;
    this.version = stand.version;
    this.saved = plain(stand.sheet);
    this.sheet = plain(stand.sheet);
    this.sent = null;
    this.request = null;
    this.timer = null;
    this.waiting = [];
    this.left = false;
    this.key = `ffmem-sheet:${person}:${id()}`;
    navigator.locks?.request(this.key, () => new Promise(() => {})); // until the page is gone
    document.addEventListener("visibilitychange", () => (document.hidden ? this.send() : this.refresh()));
    addEventListener("pagehide", () => {
      this.left = true; // the next page of this sheet takes over
      this.send();
      this.keep();
    });
    addEventListener("pageshow", (event) => event.persisted && location.reload());
    addEventListener("online", () => this.refresh());
    this.takeOver(`ffmem-sheet:${person}:`);
    const left = {
      lost: (why) => on.state("lost", `Work of before is not saved yet: ${why}, trying again`),
      clash: on.clash,
      own: addresses.save,
      elsewhere: (address) => on.elsewhere(address),
      done: (address) => {
        if (this.idle) this.rest();
        if (address === addresses.save) this.refresh();
      },
    };
    recover(person, left);
    setTimeout(() => recover(person, left), 2_000); // a page that was just left may hold its lock
  }

  // Goes on where the page that was just left, or reloaded, stood: as if it had stayed open.
  takeOver(prefix) {
    const all = storage.keys(prefix).map((key) => [key, storage.get(key)]);
    const [key, record] = all.filter(([, one]) => one?.left && one.address === this.addresses.save).at(-1) ?? [];
    if (!record) return;
    this.version = record.version;
    this.saved = plain(record.base);
    this.sheet = plain(record.pending?.sheet ?? record.sent?.sheet ?? record.base);
    this.request = record.pending?.request ?? null;
    storage.set(this.key, { ...record, left: false });
    storage.remove(key);
    if (record.sent) this.deliver(record.sent);
    else this.send();
  }

  get idle() {
    return !this.sent && same(this.sheet, this.saved);
  }

  change(make) {
    const next = structuredClone(this.sheet);
    make(next);
    this.sheet = plain(next);
    this.keep();
    this.on.sheet();
    if (!this.sent) this.on.state("changed", "Saving …");
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.send(), SOON);
  }

  // Writes down what is not acknowledged yet.
  keep() {
    const known = this.sent ? this.sent.sheet : this.saved;
    const pending = same(this.sheet, known) ? null : { request: (this.request = id()), sheet: this.sheet };
    const record = { address: this.addresses.save, version: this.version, base: this.saved, sent: this.sent, pending, left: this.left };
    if (!pending && !this.sent) storage.remove(this.key);
    else this.kept = storage.set(this.key, record);
  }

  // Sends what was changed; nothing is sent while something is under way.
  async send() {
    clearTimeout(this.timer);
    if (this.sent || this.asking) return;
    if (same(this.sheet, this.saved)) return this.rest();
    const body = { base: this.version, request: this.request ?? id(), sheet: this.sheet };
    await this.deliver({ address: this.addresses.save, body, sheet: this.sheet });
  }

  // Goes back or forth among what was saved.
  async step(what) {
    await this.settled();
    const body = { base: this.version, request: id() };
    await this.deliver({ address: this.addresses[what], body, sheet: this.sheet });
    return this.settled();
  }

  async deliver(sent) {
    this.sent = sent;
    this.keep();
    this.on.state("saving", "Saving …");
    const why = (reason) => this.on.state("lost", `Not saved: ${reason}, trying again${this.kept ? "" : ". Keep this page open"}`);
    const { status, content } = await post(sent.address, sent.body, why);
    this.sent = null;
    if (status === 200) this.accept(sent.sheet, content, sent.address === this.addresses.save);
    else if (status === 409) await this.ask(content);
    else return this.refused(status, content.error);
    this.keep();
    return this.send();
  }

  accept(known, content, tell) {
    const after = plain(content.sheet);
    const joined = merge(known, this.sheet, after);
    if (tell && !same(known, after)) this.on.incoming(`Joined with what came from elsewhere: ${difference(known, after)}.`);
    for (const one of joined.clashes) this.on.incoming(`${one.what}: yours stands; elsewhere it was “${one.theirs}”.`);
    this.version = content.version;
    this.saved = after;
    this.sheet = joined.sheet;
    this.on.stand(content);
    this.on.sheet();
  }

  async ask(theirs) {
    const base = this.saved;
    const { clashes } = merge(base, this.sheet, theirs.sheet);
    this.asking = true;
    if (clashes.length) this.on.state("held", "Not saved: two versions");
    const prefer = clashes.length ? await this.on.clash(clashes) : "mine";
    this.asking = false;
    const joined = merge(base, this.sheet, theirs.sheet, prefer);
    this.version = theirs.version;
    this.saved = plain(theirs.sheet);
    this.sheet = joined.sheet;
    this.on.stand(theirs);
    this.on.sheet();
  }

  refused(status, error) {
    if (this.sheet.done && !this.saved.done) this.sheet = { ...this.sheet, done: false };
    this.keep();
    this.on.sheet();
    this.on.state("refused", status === 401 ? `Not saved: ${error}` : error);
    this.wake();
  }

  rest() {
    this.keep();
    this.on.state("saved", `Saved ${new Date().toTimeString().slice(0, 5)}`);
    this.wake();
  }

  wake() {
    for (const resolve of this.waiting.splice(0)) resolve();
  }

  // Resolves when everything is saved, or refused.
  async settled() {
    if (this.idle) return;
    const waiting = new Promise((resolve) => this.waiting.push(resolve));
    this.send();
    await waiting;
  }

  // Looks whether somebody else has changed the sheet.
  async refresh() {
    if (!this.idle || this.asking) return;
    try {
      const answer = await fetch(this.addresses.save, { signal: AbortSignal.timeout(PATIENCE) });
      if (!answer.ok) return;
      const content = await answer.json();
      if (content.version <= this.version || this.sent) return;
      this.accept(this.saved, content, true);
      this.keep();
      if (!this.idle) this.send();
    } catch {
      // The next save will tell.
    }
  }
}
