// Light, dark, or as the system says; remembered where the browser lets us.

const KEY = "tensortap-theme";
type Theme = "" | "light" | "dark";
const NEXT: Record<Theme, Theme> = { "": "light", light: "dark", dark: "" };
const NAMES: Record<Theme, string> = { "": "Theme: system", light: "Theme: light", dark: "Theme: dark" };

export function start(changed: () => void): void {
  apply(remembered());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);
}

export function name(): string {
  return NAMES[current()];
}

export function next(): void {
  const theme = NEXT[current()];
  apply(theme);
  try {
    localStorage.setItem(KEY, theme);
  } catch {
    // a report opened from a file may have no storage; the choice then lasts as long as the page
  }
}

function current(): Theme {
  return (document.documentElement.dataset["theme"] ?? "") as Theme;
}

function apply(theme: Theme): void {
  if (theme) document.documentElement.dataset["theme"] = theme;
  else delete document.documentElement.dataset["theme"];
}

function remembered(): Theme {
  try {
    const found = localStorage.getItem(KEY);
    return found === "light" || found === "dark" ? found : "";
  } catch {
    return "";
  }
}
