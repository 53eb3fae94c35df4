// Tags and a note of a run, kept by the server in a file beside the runs: shown, and edited in place.

import { fill, h } from "./dom.ts";
import type { Source } from "./source.ts";
import type { RunSummary } from "./types.ts";

export class NoteEditor {
  readonly element = h("div", { class: "note" });

  constructor(
    private readonly run: RunSummary,
    private readonly source: Source,
  ) {
    this.show();
  }

  private show(): void {
    const { tags = [], note = "", id } = this.run;
    const text = tags.length || note ? "edit" : "add";
    const name = `${text} tags and note of ${id}`;
    const edit = h("button", { type: "button", class: "small plain", "aria-label": name, onclick: () => this.edit() }, text);
    fill(
      this.element,
      tags.map((tag) => h("span", { class: "tag" }, tag)),
      note ? h("span", { class: "text" }, note) : null,
      this.source.post ? edit : null,
    );
  }

  private edit(): void {
    const { tags = [], note = "", id } = this.run;
    const words = h("input", { value: tags.join(", "), placeholder: "tags, by commas", "aria-label": `Tags of ${id}` });
    const text = h("textarea", { rows: 2, placeholder: "note", "aria-label": `Note of ${id}` }, note);
    const wrong = h("span", { class: "wrong", role: "alert" });
    const form = h(
      "form",
      {},
      words,
      text,
      h("span", {}, h("button", { type: "submit", class: "small" }, "Keep"), h("button", { type: "button", class: "small", onclick: () => this.show() }, "Cancel")),
      wrong,
    );
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      void this.keep(words.value.split(",").map((tag) => tag.trim()).filter(Boolean), text.value, wrong);
    });
    fill(this.element, form);
    words.focus();
  }

  private async keep(tags: string[], note: string, wrong: HTMLElement): Promise<void> {
    try {
      Object.assign(this.run, await this.source.post!("/api/notes", { run: this.run.id, tags, note }));
      this.show();
    } catch (error) {
      wrong.textContent = (error as Error).message;
    }
  }
}
