// The list of runs in a folder.

import { h } from "./dom.ts";
import { count, date } from "./format.ts";
import type { Router } from "./router.ts";
import { code, empty } from "./states.ts";
import type { RunSummary, Runs } from "./types.ts";
import type { View } from "./view.ts";

const HEAD = ["run", "state", "started", "steps", "sites", "records", "model"];

export class RunsPage implements View {
  readonly element = h("div", { class: "page read" });

  constructor(
    { folder, runs }: Runs,
    private readonly router: Router,
  ) {
    if (!runs.length) {
      this.element.append(
        empty(
          "No run in this folder",
          code(folder),
          "Record one, then reload:",
          code('with tt.watch(model, to="runs/first") as tap: …'),
        ),
      );
      return;
    }
    const head = h(
      "thead",
      {},
      h(
        "tr",
        {},
        HEAD.map((name) => h("th", { scope: "col" }, name)),
      ),
    );
    this.element.append(
      h(
        "section",
        {},
        h("h2", {}, "Runs in ", code(folder)),
        h(
          "table",
          {},
          head,
          h(
            "tbody",
            {},
            runs.map((run) => this.row(run)),
          ),
        ),
      ),
    );
  }

  update(): void {}
  refresh(): void {}
  close(): void {}

  private row(run: RunSummary): HTMLElement {
    const numbers = [run.steps, run.sites, run.records].map((value) => h("td", { class: "number" }, count(value)));
    const name = h("a", { href: `#/overview?run=${encodeURIComponent(run.id)}` }, run.id || "this run");
    const state = h("span", { class: `badge ${run.state}`, title: run.error ?? null }, run.state);
    const compare = this.router.route.params["run"] ? null : run.error;
    return h(
      "tr",
      {},
      h("td", {}, name),
      h("td", {}, state),
      h("td", {}, date(run.started)),
      numbers,
      h("td", { class: "wrap" }, run.model ?? "", compare ? ` ${compare}` : ""),
    );
  }
}
