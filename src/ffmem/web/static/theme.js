// Runs before the first paint: the theme that the visitor chose, else the system's.
try {
  const chosen = localStorage.getItem("ffmem-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch {
  // Storage is off: the system's theme.
}
