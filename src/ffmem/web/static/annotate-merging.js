// What two changes of the same sheet come to together; the same rules as on the server.
// A mark that somebody set and nobody took away stays; only words that both changed clash.

const NAMES = { no_pattern: "no pattern here", related: "related", note: "the note", done: "handed in" };

// A sheet in the one form in which two equal sheets are equal texts.
export function plain(sheet) {
  return {
    patterns: sheet.patterns.map((one) => ({
      id: one.id,
      description: one.description,
      kind: one.kind,
      marks: [...one.marks].sort((a, b) => a - b),
    })),
    no_pattern: sheet.no_pattern,
    related: sheet.related,
    note: sheet.note,
    done: sheet.done,
  };
}

export function same(one, other) {
  return JSON.stringify(plain(one)) === JSON.stringify(plain(other));
}

// Returns { sheet, clashes }: where words clash, the sheet has those that `prefer` says.
export function merge(base, mine, theirs, prefer = "mine") {
  if (same(mine, base)) return { sheet: plain(theirs), clashes: [] };
  if (same(theirs, base)) return { sheet: plain(mine), clashes: [] };
  const clashes = [];
  const one = (before, ours, others, what) => {
    if (ours === before || ours === others) return others;
    if (others === before) return ours;
    clashes.push({ what, mine: ours, theirs: others });
    return prefer === "mine" ? ours : others;
  };
  const by = (sheet) => new Map(sheet.patterns.map((pattern) => [pattern.id, pattern]));
  const [known, ours, others] = [by(base), by(mine), by(theirs)];
  const text = (pattern) => JSON.stringify(plain({ patterns: [pattern] }));
  const patterns = [];
  for (const id of new Set([...others.keys(), ...ours.keys()])) {
    const [before, a, b] = [known.get(id), ours.get(id), others.get(id)];
    if (!a || !b) {
      // Removed by one: it stays only if the other changed it, or made it.
      const left = a || b;
      if (!before || text(left) !== text(before)) patterns.push(left);
      continue;
    }
    const start = before || { id, description: "", kind: null, marks: [] };
    const [was, left, right] = [start.marks, a.marks, b.marks].map((marks) => new Set(marks));
    const marks = [...new Set([...left, ...right])].filter((mark) => !was.has(mark) || (left.has(mark) && right.has(mark)));
    const number = patterns.length + 1;
    patterns.push({
      id,
      description: one(start.description, a.description, b.description, `description of pattern ${number}`),
      kind: one(start.kind, a.kind, b.kind, `kind of pattern ${number}`),
      marks: marks.sort((x, y) => x - y),
    });
  }
  const sheet = { patterns };
  for (const [name, what] of Object.entries(NAMES)) sheet[name] = one(base[name], mine[name], theirs[name], what);
  return { sheet: plain(sheet), clashes };
}

// What is in a sheet that was not in another, in words.
export function difference(before, after) {
  const count = (sheet) => sheet.patterns.reduce((sum, one) => sum + one.marks.length, 0);
  const known = new Set(before.patterns.map((one) => one.id));
  const made = after.patterns.filter((one) => !known.has(one.id)).length;
  const marks = count(after) - count(before);
  const said = [];
  if (made) said.push(`${made} pattern${made === 1 ? "" : "s"}`);
  if (marks > 0) said.push(`${marks} mark${marks === 1 ? "" : "s"}`);
  return said.join(" and ") || "changes";
}
