// Other runs drawn into the same charts: which ones the address names, their colours, and the menu that chooses them.

import { token } from "./colours.ts";
import type { Columns } from "./columns.ts";
import { h } from "./dom.ts";
import { shortened } from "./format.ts";
import { aborted, type Params, type Source } from "./source.ts";
import type { Context } from "./view.ts";

export const MOST = 5;
const SHOWN = 200;

export interface Other {
  name: string;
  colour: string;
  data: Columns;
}

export function otherRuns(params: Record<string, string>): string[] {
  return (params["with"] ?? "").split("|").filter(Boolean).slice(0, MOST);
}

export function colourOf(at: number): string {
  return token(`run-${(at % MOST) + 1}`);
}

/** The same question to the other runs; a run that cannot answer is left out. */
export async function ask(
  source: Source,
  names: readonly string[],
  path: string,
  params: Params,
  signal?: AbortSignal,
): Promise<Other[]> {
  const asked = names.map(async (name, at): Promise<Other | null> => {
    try {
      return { name, colour: colourOf(at), data: await source.columns(path, { ...params, run: name }, signal) };
    } catch (error) {
      if (aborted(error)) throw error;
      return null;
    }
  });
  return (await Promise.all(asked)).filter((one) => one !== null);
}

/** A menu of the other runs in this folder. */
export function overlayMenu(context: Context, params: Record<string, string>): HTMLElement | null {
  const others = (context.runs ?? []).filter((run) => run.id !== context.run.id && run.steps > 0).slice(0, SHOWN);
  if (!others.length || !context.source.live) return null;
  const chosen = otherRuns(params);
  const toggle = (id: string) => {
    const next = chosen.includes(id) ? chosen.filter((one) => one !== id) : [...chosen, id];
    context.router.set({ with: next.slice(-MOST).join("|") || null });
  };
  const items = others.map((run) => {
    const at = chosen.indexOf(run.id);
    const box = h("input", { type: "checkbox", checked: at >= 0, onchange: () => toggle(run.id) });
    const swatch = at < 0 ? null : h("i", { class: "swatch line", style: `background: ${colourOf(at)}` });
    return h("li", {}, h("label", {}, box, swatch, shortened(run.id, 48)));
  });
  const menu = h(
    "details",
    { class: "menu" },
    h("summary", { title: "Draw other runs into the same charts" }, chosen.length ? `overlay: ${chosen.length}` : "overlay runs"),
    h("ul", {}, items),
  );
  menu.open = wasOpen;
  menu.addEventListener("toggle", () => (wasOpen = menu.open));
  return menu;
}

let wasOpen = false; // the tools are drawn anew at every choice
