// What stands where there is nothing to draw: loading, empty, failed. Each says what to do.

import { h } from "./dom.ts";
import { Failure } from "./source.ts";
import type { RunInfo } from "./types.ts";

export function loading(what: string): HTMLElement {
  return h("div", { class: "state", role: "status" }, h("p", {}, `Reading ${what}…`));
}

export function empty(title: string, ...todo: (string | Node)[]): HTMLElement {
  return h("div", { class: "state", role: "status" }, h("h2", {}, title), ...todo.map((line) => h("p", {}, line)));
}

export function failed(error: unknown): HTMLElement {
  const message = error instanceof Error ? error.message : String(error);
  const hint = error instanceof Failure ? error.hint : "";
  return h("div", { class: "state failed", role: "alert" }, h("h2", {}, message), hint ? h("p", {}, hint) : null);
}

/** What to say of a run that holds no steps. */
export function nothingYet(run: RunInfo): HTMLElement {
  if (run.state === "live") {
    return empty(
      "Waiting for the first step",
      "It appears here by itself when tap.step() has closed it, or when the model is called again.",
    );
  }
  const how =
    run.state === "crashed"
      ? "The process ended before a step was closed."
      : "The run was closed before a step was recorded.";
  return empty(
    "This run holds no steps",
    how,
    "Record one with:",
    code("with tt.watch(model) as tap: …; tap.step(loss=loss)"),
  );
}

export function code(text: string): HTMLElement {
  return h("code", {}, text);
}
