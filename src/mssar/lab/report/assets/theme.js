// Before anything is painted: that there are scripts, and whether the reader chose light or dark.
document.documentElement.classList.add("js");
try {
  const chosen = localStorage.getItem("mssar-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch {
  // A page from file:// may have no storage.
}
