// The row of controls above the heat map: statistic, port, filter, span of steps, metrics.

import { fill, h, select } from "./dom.ts";
import { count, shortened } from "./format.ts";
import type { Patch } from "./router.ts";
import { Failure } from "./source.ts";
import { nameOf } from "./stats.ts";
import type { Context } from "./view.ts";

const TYPED = 250; // milliseconds after the last letter

export class Tools {
  readonly element = h("div", { class: "tools", role: "toolbar", "aria-label": "What the heat map shows" });
  private readonly filter: HTMLInputElement;
  private readonly error = h("span", { class: "wrong", role: "alert", hidden: true });
  private later = 0;

  constructor(
    private readonly context: Context,
    private readonly set: (patch: Patch) => void,
  ) {
    this.filter = h("input", {
      type: "search",
      placeholder: "filter sites ( / )",
      title: "A word, or a pattern: blocks.*.mlp  type:*Norm  re:h\\.[0-3]\\..*  fc:{input,output}",
      "aria-label": "Filter sites by pattern",
      spellcheck: "false",
    });
    this.filter.addEventListener("input", () => {
      clearTimeout(this.later);
      this.later = window.setTimeout(() => this.set({ sites: this.filter.value.trim() }), TYPED);
    });
    this.filter.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" && event.key !== "Enter") return;
      event.stopPropagation();
      this.filter.blur();
    });
  }

  stats(): string[] {
    const ports = new Set(this.context.run.sites.map((site) => site.port));
    const gradients = this.context.run.ports.some((port) => port.gradient && ports.has(port.name));
    const absent = [...(gradients ? [] : ["grad"]), ...(ports.has("update") ? [] : ["update"])];
    return this.context.run.stats.filter((stat) => !absent.includes(stat));
  }

  focus(): void {
    this.filter.focus();
    this.filter.select();
  }

  draw(
    params: Record<string, string>,
    stat: string,
    port: string,
    chips: HTMLElement,
    span: { from: number | null; to: number | null },
    all: () => void,
  ): void {
    const typing = document.activeElement === this.filter;
    if (!typing) this.filter.value = params["sites"] ?? "";
    const held = document.activeElement?.getAttribute("aria-label");
    fill(
      this.element,
      h(
        "label",
        {},
        "statistic",
        select(
          "Statistic",
          this.stats().map((name) => [name, nameOf(name)] as const),
          stat,
          (value) => this.set({ stat: value }),
        ),
      ),
      h(
        "label",
        {},
        "port",
        select("Port", ["all", ...this.ports()], port, (value) => this.set({ port: value })),
      ),
      this.filter,
      this.zoomed(span, all),
      chips,
      this.error,
    );
    if (typing) this.filter.focus();
    else if (held) (this.element.querySelector(`[aria-label="${held}"]`) as HTMLElement | null)?.focus();
  }

  /** What is wrong with the filter, in the words that were typed. */
  wrong(error: unknown, asked: string): void {
    this.error.hidden = !error;
    const text = error instanceof Failure ? `${error.message} ${error.hint}` : String(error);
    const typed = this.filter.value.trim();
    const said = asked ? text.replace(/^.*(?= matches nothing)/, typed).replaceAll(asked, typed) : text;
    if (error) this.error.textContent = shortened(said, 400);
  }

  private ports(): string[] {
    const there = new Set(this.context.run.sites.map((site) => site.port));
    return this.context.run.ports.map((port) => port.name).filter((name) => there.has(name));
  }

  private zoomed(span: { from: number | null; to: number | null }, all: () => void): HTMLElement | null {
    if (span.from === null && span.to === null) return null;
    const { first, last } = this.context.run.steps;
    return h(
      "button",
      { type: "button", class: "small", onclick: all, title: "Show all steps" },
      `steps ${count(span.from ?? first)}–${count(span.to ?? last)} ✕`,
    );
  }
}
